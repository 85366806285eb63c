"""The benchmarks measure what they say, refuse what is wrong, and publish only committed rows."""

from pathlib import Path

import pytest
import torch

from benchmarks import figure1, rows, run, tables
from benchmarks.cases import CASES, Case, Task
from benchmarks.measure import interleaved, peak_bytes, percentiles, place
from benchmarks.models import native_config, small_config, to_native
from minimax_hybrid.config import MiniMaxM1Config
from minimax_hybrid.cost import parameters, softmax_twin
from minimax_hybrid.model import MiniMaxM1ForCausalLM

ROOT = Path(__file__).parent.parent


def row(**changes) -> rows.Row:
    fields = dict(
        case="native", side="ours", task="prefill", length=1024, batch=1, dtype="float32", metric="time",
        unit="s", p20=0.9, p50=1.0, p80=1.2, rounds=5, device="a machine, 2 threads", torch="2.13.0",
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
    assert all(set(case.taking_part(task)) <= set(case.sides) for task in case.tasks + case.quick)


@pytest.mark.parametrize("name", list(CASES))
def test_every_side_of_every_kind_of_task_runs(name):
    case = CASES[name]
    for task in {task.kind: task for task in case.tasks}.values():
        small = Task(task.kind, 48, task.batch, "bfloat16" if name == "native" else "float32")
        for side in case.sides:
            case.prepare(side, small)()


def test_transformers_class_gives_the_same_logits_where_its_rotary_allows():
    ours = MiniMaxM1ForCausalLM(MiniMaxM1Config.tiny(rotary_dim=32)).eval()
    native = to_native(ours).eval()
    tokens = torch.randint(0, 128, (2, 70))
    with torch.inference_mode():
        torch.testing.assert_close(ours(tokens).logits, native(tokens).logits, atol=1e-4, rtol=1e-4)
    assert parameters(native_config()).total == 118_927_360


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
    assert len(interleaved(sides, rounds=50, budget=0.0)["a"]) == 3


def test_percentiles_are_those_of_the_values():
    assert percentiles([5.0, 1.0, 2.0, 3.0, 4.0, 0.0]) == pytest.approx((1.0, 2.5, 4.0))


def test_peak_memory_sees_what_was_held_and_released():
    small = peak_bytes(lambda: None)
    large = peak_bytes(lambda: torch.ones(2**25).sum())
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
    lines = tables.case_table(CASES["native"], measured).splitlines()
    assert lines[2] == "| prefill 1K | float32 | 1.00 ± 0.15 s | 2.50 ± 0.15 s | 2.50x | 4.90 GB | - |"
    assert lines[3] == "| decode after 8 x 1K | float32 | 400 ± 20 tokens/s | - | - | - | - |"


def test_pages_are_what_the_committed_rows_give():
    for path in rows.files():
        assert path.with_suffix(".md").read_text() == tables.page(path), "run python -m benchmarks.tables"
    assert figure1.PAGE.read_text() == figure1.page(), "run python -m benchmarks.figure1"
