"""The benchmarks measure what they say, refuse what is wrong, and publish only committed rows."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks import cases, run
from benchmarks.harness import measure, pages, plot, rows
from benchmarks.harness.measure import Task, interleaved, taking_part
from benchmarks.harness.rows import percentiles

ROOT = Path(__file__).parents[2]
COMPARISONS = ["native", "twin", "operators", "log_probs", "train"]


def row(**changes) -> rows.Row:
    fields = dict(
        case="native", side="ours", task="prefill", length=1024, batch=1, dtype="float32", metric="time",
        unit="s", p20=0.9, p50=1.0, p80=1.2, rounds=5, device="a machine", cpu="a machine",
        threads=2, torch="2.13.0",
        triton="none", transformers="5.24.0", commit="abc1234", date="2026-01-01T10:00Z",
    )  # fmt: skip
    return rows.Row(**{**fields, **changes})


def case_of_a_moment(tests: tuple[str, ...], work=lambda: None) -> ModuleType:
    tasks, sides = (Task("prefill", 8, rounds=4),), ("ours", "transformers")
    return SimpleNamespace(TESTS=tests, SIDES=sides, TASKS=tasks, QUICK=tasks, prepare=lambda *_: work)


def options(**changes) -> Namespace:
    return Namespace(**{"quick": False, "only": "", "out": None, "words": "--as given", **changes})


@pytest.mark.parametrize("name", list(cases.CASES))
def test_every_case_says_what_it_is_and_names_tests_that_exist(name):
    case = cases.load(name)
    assert case.ABOUT == cases.about(name) and not case.ABOUT.endswith(".")
    paths = [test.split("::")[0] for test in case.TESTS if test.startswith("tests/")]
    assert (paths or name == "gpu") and all((ROOT / path).exists() for path in paths)
    assert hasattr(case, "run") != hasattr(case, "prepare") or name == "gpu"


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_tasks_of_a_comparison_differ_and_someone_takes_part(name):
    case = cases.load(name)
    shapes = [(task.kind, task.length, task.batch, task.dtype) for task in case.TASKS]
    assert len(set(shapes)) == len(shapes)
    for task in case.TASKS + case.QUICK:
        assert taking_part(case, task) and set(task.without) < set(case.SIDES)


@pytest.mark.slow
def test_a_case_runs_by_its_name_alone():
    """Fails if a case's tests do, or if it does not give its table."""
    command = [sys.executable, "-m", "benchmarks.run", "operators", "--quick", "--only", "forward float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| forward 1K | float32 |" in done.stdout and "chunked" in done.stdout


def test_rounds_are_interleaved_and_counted_from_the_second():
    turns: list[str] = []
    sides = {name: lambda name=name: turns.append(name) for name in ("a", "b")}
    seconds = interleaved(sides, rounds=5)
    assert turns == ["a", "b"] * 6 and {len(s) for s in seconds.values()} == {5}
    assert len(interleaved(sides, rounds=50, budget=0.0)["a"]) == 1


def test_a_long_first_round_is_counted(monkeypatch):
    monkeypatch.setattr(measure, "LONG", -1.0)
    turns: list[str] = []
    seconds = interleaved({name: lambda name=name: turns.append(name) for name in ("a", "b")}, rounds=4)
    assert turns == ["a", "b"] * 4 and {len(s) for s in seconds.values()} == {4}


def test_percentiles_are_those_of_the_values():
    assert percentiles([5.0, 1.0, 2.0, 3.0, 4.0, 0.0]) == pytest.approx((1.0, 2.5, 4.0))


def test_peak_memory_sees_what_was_held_and_released():
    # in a process of its own: what other tests have freed would be used again
    code = (
        "import torch; from benchmarks.harness.measure import peak_bytes; "
        "print(peak_bytes(lambda: None), peak_bytes(lambda: torch.ones(2**25).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert 0.9 * 2**27 < large - small < 1.5 * 2**27


def test_a_case_whose_test_fails_is_not_measured(tmp_path, monkeypatch):
    failing = tmp_path / "test_red.py"
    failing.write_text("def test_red():\n    assert False, 'this is wrong'\n")
    worked = []
    case = case_of_a_moment((str(failing),), lambda: worked.append(1))
    monkeypatch.setattr(run, "load", lambda name: case)
    with pytest.raises(SystemExit, match="this is wrong"):
        run.run_case("native", options(out=tmp_path))
    assert not worked and not list(tmp_path.glob("*.csv"))


def test_a_quick_run_writes_nothing_and_a_full_one_a_row_for_each_side(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load", lambda name: case_of_a_moment(()))
    monkeypatch.setattr(pages, "table", lambda name, found: f"{len(found)} rows")
    run.run_case("native", options(out=tmp_path, quick=True))
    assert not list(tmp_path.glob("*.csv"))
    run.run_case("native", options(out=tmp_path))
    (path,) = tmp_path.glob("*.csv")
    written = rows.read(path)
    assert [(r.side, r.rounds, r.device) for r in written] == [
        (side, 4, rows.device_name()) for side in ("ours", "transformers")
    ]
    assert all(0 <= r.p20 <= r.p50 <= r.p80 and r.options == "--as given" for r in written)


def test_rows_taken_before_a_failure_are_kept(tmp_path, monkeypatch):
    def broken(options):
        yield row()
        raise RuntimeError("the second fails")

    monkeypatch.setattr(run, "load", lambda name: SimpleNamespace(TESTS=(), run=broken))
    with pytest.raises(RuntimeError):
        run.run_case("native", options(out=tmp_path))
    assert [r.p50 for path in tmp_path.glob("*.csv") for r in rows.read(path)] == [1.0]


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    assert rows._commit.__wrapped__() == "unknown"


def test_numbers_that_a_row_keeps_are_read_back_as_they_were(tmp_path):
    kept = row(at=("a,b", ' "', "5"), values=(0.1 + 0.2, 3, 1e-24))
    rows.append(tmp_path / "a.csv", [kept])
    assert rows.read(tmp_path / "a.csv") == [kept]


def test_the_newest_row_of_a_number_is_read(tmp_path):
    path = tmp_path / "a.csv"
    rows.append(path, [row(p50=3.0), row(side="transformers")])
    rows.append(path, [row(p50=2.0)])
    assert [(r.side, r.p50) for r in rows.read(path)] == [("ours", 2.0), ("transformers", 1.0)]
    assert rows.read(path, "twin") == []


def test_a_table_says_times_rates_ratios_and_memory():
    measured = [
        row(),
        row(side="transformers", p50=2.5),
        row(metric="peak memory", unit="B", p50=4.9e9),
        row(task="decode", batch=8, p20=0.019, p50=0.02, p80=0.021),
    ]
    lines = pages.case_table(measured).splitlines()
    assert lines[2] == "| prefill 1K | float32 | 1.00 ± 0.15 s | 2.50 ± 0.15 s | 2.50x | 4.90 GB | - |"
    assert lines[3] == "| decode after 8 x 1K | float32 | 400 ± 20 tokens/s | - | - | - | - |"


def test_pictures_are_drawn_from_rows_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    measured = [
        row(case=case, side=side, task=task, length=length, metric=metric)
        for case, tasks, sides in (
            ("twin", (("prefill", "time"), ("decode", "time"), ("prefill", "peak memory")), ("hybrid",)),
            ("operators", (("forward", "time"), ("forward+backward", "time")), ("chunked", "softmax")),
            ("passkey", (("train", "loss"), ("recall", "accuracy")), ("hybrid", "lightning")),
        )
        for task, metric in tasks
        for side in sides
        for length in (1024, 2048)
    ]
    rows.append(tmp_path / "a.csv", measured)
    drawn = plot.draw_all(tmp_path)
    assert [path.name for path in drawn] == ["twin.svg", "operators.svg", "passkey.svg", "figure1_right.svg"]
    assert all(path.stat().st_size > 5000 for path in drawn)


def test_pages_are_what_the_committed_rows_give():
    found = pages.pages()
    assert {"README.md", "policy.md", "figure1.md"} <= {path.name for path in found}
    for path, text in found.items():
        assert path.read_text() == text, f"{path} is old: run python -m benchmarks.run --pages"
    for path in (pages.README, pages.POLICY):
        assert "Not measured" not in path.read_text()


def test_a_table_between_marks_is_written_again(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    rows.append(tmp_path / "a.csv", [row(), row(side="transformers")])
    text = "before\n<!-- rows: native -->\nold\n<!-- end of rows -->\nafter <!-- rows: twin -->"
    once = pages.filled(text)
    assert once.startswith("before\n<!-- rows: native -->\n| task |") and "old" not in once
    assert "2026-01-01, a machine, 2 threads, torch 2.13.0, transformers 5.24.0, commit abc1234." in once
    assert once.endswith("\n<!-- end of rows -->\nafter <!-- rows: twin -->")
    assert pages.filled(once) == once
