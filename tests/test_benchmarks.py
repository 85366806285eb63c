"""The benchmarks measure what they say, refuse what is wrong, and publish only committed rows."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import figure1, measure, million, models, passkey, plot, rows, run, tables
from benchmarks.cases import CASES, Case, Task
from benchmarks.measure import interleaved, percentiles, place
from benchmarks.models import native_config, native_work, small_config
from minimax_hybrid.cost.counts import parameters, softmax_twin
from minimax_hybrid.model import MiniMaxM1ForCausalLM

ROOT = Path(__file__).parent.parent


def row(**changes) -> rows.Row:
    fields = dict(
        case="native", side="ours", task="prefill", length=1024, batch=1, dtype="float32", metric="time",
        unit="s", p20=0.9, p50=1.0, p80=1.2, rounds=5, device="a machine", threads=2, torch="2.13.0",
        triton="none", transformers="5.24.0", commit="abc1234", date="2026-01-01T10:00Z",
    )  # fmt: skip
    return rows.Row(**{**fields, **changes})


def task_of_a_moment(case_tests=(), work=lambda: None) -> Case:
    tasks, sides = (Task("prefill", 8, rounds=4),), ("ours", "transformers")
    return Case("native", "a test", sides, tuple(case_tests), tasks, tasks, lambda *_: work)


@pytest.mark.parametrize("name", list(CASES))
def test_every_case_names_tests_that_exist_and_tasks_that_differ(name):
    case = CASES[name]
    paths = [test.split("::")[0] for test in case.tests if test.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)
    shapes = [(task.kind, task.length, task.batch, task.dtype) for task in case.tasks]
    assert len(set(shapes)) == len(shapes)
    tasks = case.tasks + case.quick
    assert all(case.taking_part(task) and set(task.without) < set(case.sides) for task in tasks)


@pytest.mark.parametrize("name", list(CASES))
def test_every_side_of_every_kind_of_task_runs(name):
    case = CASES[name]
    for task in {task.kind: task for task in case.tasks}.values():
        small = Task(task.kind, 48, task.batch, "bfloat16" if name == "native" else "float32")
        for side in case.taking_part(small):
            case.prepare(side, small)()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_both_sides_of_the_native_case_compute_the_same(dtype, tolerance):
    assert parameters(native_config()).total == 118_927_360
    for kind, steps in (("prefill", 1), ("decode", 3), ("train", 1)):
        task = Task(kind, 70, 2, dtype)
        work = [native_work(side, task) for side in ("ours", "transformers")]
        for _ in range(steps):
            ours, theirs = (compute().float() for compute in work)
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    models._native_pair.cache_clear()


@pytest.mark.parametrize("twin", [False, True])
def test_the_twins_decode_as_they_prefill(twin):
    config = softmax_twin(small_config()) if twin else small_config()
    model = MiniMaxM1ForCausalLM(config).eval()
    assert sum(p.numel() for p in model.parameters()) == parameters(config).total
    tokens = torch.randint(0, 8192, (1, 130))
    with torch.inference_mode():
        whole = model(tokens).logits[:, -1]
        memory = model(tokens[:, :-1], use_cache=True).past_key_values
        step = model(tokens[:, -1:], past_key_values=memory).logits[:, -1]
    torch.testing.assert_close(step, whole, atol=1e-5, rtol=1e-4)


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
        "import torch; from benchmarks.measure import peak_bytes; "
        "print(peak_bytes(lambda: None), peak_bytes(lambda: torch.ones(2**25).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert 0.9 * 2**27 < large - small < 1.5 * 2**27


def test_a_case_whose_test_fails_is_not_timed(tmp_path, monkeypatch):
    failing = tmp_path / "test_red.py"
    failing.write_text("def test_red():\n    assert False, 'this is wrong'\n")
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    worked = []
    case = task_of_a_moment([str(failing)], lambda: worked.append(1))
    with pytest.raises(SystemExit, match="this is wrong"):
        run.run_case(case)
    assert not worked and not list(tmp_path.glob("*.csv"))


def test_a_quick_run_writes_nothing_and_a_full_one_a_row_for_each_side(tmp_path, monkeypatch):
    passing = tmp_path / "test_green.py"
    passing.write_text("def test_green():\n    pass\n")
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    case = task_of_a_moment([str(passing)])
    assert len(run.run_case(case, quick=True)) == 2 and not list(tmp_path.glob("*.csv"))
    run.run_case(case)
    (path,) = tmp_path.glob("*.csv")
    written = rows.read(path)
    assert [(r.side, r.rounds, r.device) for r in written] == [
        (side, 4, place()["device"]) for side in ("ours", "transformers")
    ]
    assert all(0 <= r.p20 <= r.p50 <= r.p80 for r in written)


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
    lines = tables.case_table(measured).splitlines()
    assert lines[2] == "| prefill 1K | float32 | 1.00 ± 0.15 s | 2.50 ± 0.15 s | 2.50x | 4.90 GB | - |"
    assert lines[3] == "| decode after 8 x 1K | float32 | 400 ± 20 tokens/s | - | - | - | - |"


@pytest.mark.parametrize("T", [16, 100])
def test_a_needle_lies_anywhere_and_its_digits_are_the_answer(T):
    ids, digits = passkey.needles(400, T, torch.Generator().manual_seed(0))
    assert ids.shape == (400, T) and digits.shape == (400, passkey.DIGITS)
    row, start = (ids == passkey.KEY).nonzero(as_tuple=True)
    assert torch.equal(row, torch.arange(400))
    hidden = ids.gather(1, start[:, None] + 1 + torch.arange(passkey.DIGITS))
    assert torch.equal(hidden, digits)
    assert (ids[:, -passkey.DIGITS] == passkey.ASK).all() and (ids == passkey.ASK).sum() == 400
    assert torch.equal(ids[:, T - passkey.DIGITS + 1 :], digits[:, :-1])
    latest = T - 2 * passkey.DIGITS - 2
    assert start.min() == 0 and start.max() == latest
    assert sorted(set(start.tolist())) == list(range(latest + 1))


def test_accuracy_is_one_for_a_model_that_knows_and_counts_whole_answers():
    ids, digits = passkey.needles(20, 64, torch.Generator().manual_seed(1))
    plan = passkey.Plan(samples=20)

    def oracle(rows_, **_):
        found = torch.stack([digits[(ids == one).all(1).nonzero()[0, 0]] for one in rows_])
        found[:, 0] = (found[:, 0] + (rows_[:, 0] % 2)) % 10  # wrong in the first digit for odd ones
        logits = torch.nn.functional.one_hot(found, passkey.VOCABULARY).float()
        return type("Output", (), {"logits": logits})

    right = passkey.accuracy(oracle, 64, plan)
    assert sum(right) == int((ids[:, 0] % 2 == 0).sum()) and 0 < sum(right) < 20


def test_passkey_models_differ_in_the_kinds_of_their_layers_only():
    configs = {kind: passkey.passkey_config(kind).to_dict() for kind in passkey.KINDS}
    kinds = {kind: config.pop("attn_type_list") for kind, config in configs.items()}
    assert configs["hybrid"] == configs["lightning"] == configs["softmax"]
    assert kinds["hybrid"].count(1) == 1 and set(kinds["lightning"]) == {0} and set(kinds["softmax"]) == {1}


def test_a_long_prefill_goes_on_where_it_stopped(tmp_path):
    kept = tmp_path / "kept.pt"
    stopped, steps = million.run(300, piece=100, kept=kept, seconds=0.0)
    assert stopped.done == 100 and not steps and kept.exists()
    done, steps = million.run(300, piece=100, kept=kept)
    assert [n for n, _ in done.seconds] == [100, 200, 300] and len(steps) == million.DECODED
    assert done.seconds[0] == stopped.seconds[0]
    whole, _ = million.run(300, piece=300, kept=None)
    ours, theirs = (progress.cache.layers[0].current_state() for progress in (done, whole))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_milestones_sum_the_pieces_up_to_them(monkeypatch):
    monkeypatch.setattr(million, "MILESTONES", (200, 300, 400))
    progress = million.Progress(None, done=300, seconds=[(100, 1.0), (200, 2.0), (300, 4.0)], peak=10**9)
    found = {(r.task, r.length, r.metric): r.p50 for r in million.rows_of(progress, [0.25, 0.5, 0.75])}
    assert found["prefill", 200, "time"] == 3.0 and found["prefill", 300, "time"] == 7.0
    assert found["decode", 300, "time"] == 0.5 and found["prefill", 300, "peak memory"] == 1e9
    assert ("prefill", 400, "time") not in found


def test_pictures_are_drawn_from_rows_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    measured = [
        row(case=case, side=side, task=task, length=length, metric=metric)
        for case, tasks, sides in (
            ("twin", (("prefill", "time"), ("decode", "time"), ("prefill", "peak memory")), ("hybrid",)),
            ("operators", (("forward", "time"), ("forward+backward", "time")), ("chunked", "softmax")),
            ("passkey", (("train, seed 0", "loss"), ("recall, seed 0", "accuracy")), ("hybrid", "lightning")),
        )
        for task, metric in tasks
        for side in sides
        for length in (1024, 2048)
    ]
    rows.append(tmp_path / "a.csv", measured)
    drawn = plot.draw_all(tmp_path)
    assert [path.name for path in drawn] == ["twin.svg", "operators.svg", "passkey.svg"]
    assert all(path.stat().st_size > 5000 for path in drawn)


def test_pages_are_what_the_committed_rows_give():
    assert (rows.RESULTS / "README.md").read_text() == tables.index(), "run python -m benchmarks.tables"
    for path in rows.files():
        assert path.with_suffix(".md").read_text() == tables.page(path), "run python -m benchmarks.tables"
    assert figure1.PAGE.read_text() == figure1.page(), "run python -m benchmarks.figure1"
    readme = tables.README.read_text() if tables.README.exists() else ""
    assert readme == tables.filled(readme), "run python -m benchmarks.tables --readme"


def test_a_table_between_marks_is_made_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    rows.append(tmp_path / "a.csv", [row(), row(side="transformers")])
    text = "before\n<!-- rows: native -->\nold\n<!-- end of rows -->\nafter <!-- rows: twin -->"
    once = tables.filled(text)
    assert once.startswith("before\n<!-- rows: native -->\n| task |") and "old" not in once
    assert "2026-01-01, a machine, 2 threads, torch 2.13.0, transformers 5.24.0, commit abc1234." in once
    assert once.endswith("\n<!-- end of rows -->\nafter <!-- rows: twin -->")
    assert tables.filled(once) == once
