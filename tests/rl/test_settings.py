"""A settings file says everything once, its mistakes are named, and the output window grows as it should."""

from pathlib import Path

import pytest

from minimax_hybrid.rl.objective import CISPO, DAPO
from minimax_hybrid.rl.settings import StagedWindow, TrainSettings, read_objective, read_settings

PLAIN = """
model = "demo"
output = "runs/one"
task = "addition"
difficulty = 2
learning_rate = 5e-5
batches = 10
windows = [8, 16]
"""
OBJECTIVE = """
[objective]
name = "cispo"
ratio_max = 5.0
"""


def read(tmp_path: Path, text: str) -> TrainSettings:
    (tmp_path / "run.toml").write_text(text)
    return read_settings(tmp_path / "run.toml")


def test_a_file_gives_its_settings_and_the_reports_defaults(tmp_path: Path) -> None:
    settings = read(tmp_path, PLAIN + OBJECTIVE)
    assert settings.objective == CISPO(ratio_max=5.0)
    assert settings.windows == (8, 16)
    assert settings.updates == 16
    assert settings.temperature == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PLAIN, "objective"),
        (PLAIN.replace("learning_rate = 5e-5", "") + OBJECTIVE, "learning_rate"),
        (PLAIN + "epsilon_high = 0.2" + OBJECTIVE, "unknown settings \\['epsilon_high'\\]"),
        (PLAIN + "updates = 0" + OBJECTIVE, "updates must be at least 1"),
        (PLAIN + "updates = 300" + OBJECTIVE, "more than the 256 responses"),
        (PLAIN.replace("5e-5", "0.0") + OBJECTIVE, "learning_rate and max_grad_norm must be above 0"),
        (PLAIN + OBJECTIVE.replace("ratio_max = 5.0", ""), "ratio_max"),
        (PLAIN + OBJECTIVE.replace("5.0", "0.28"), "the maximum here"),
        (PLAIN + OBJECTIVE.replace("cispo", "ppo"), "objective.name is 'ppo'"),
        (PLAIN + OBJECTIVE + "[[later]]\nbatch = 5\nrate = 1e-5", "later: unknown settings \\['rate'\\]"),
        (PLAIN + OBJECTIVE + "[[later]]\nlearning_rate = 1e-5", "later: .*batch"),
        (PLAIN + OBJECTIVE + "[[later]]\nbatch = 5\nlearning_rate = -1e-5", "above 0, got -1e-05"),
        (PLAIN + OBJECTIVE + "[[later]]\nbatch = 5\n[[later]]\nbatch = 5", "must grow.*\\[5, 5\\]"),
        (PLAIN.replace("[8, 16]", "9") + OBJECTIVE, "windows is 9; write it as a list"),
        (PLAIN + "reward_range = 1" + OBJECTIVE, "reward_range is 1; write it as a list"),
        (PLAIN + OBJECTIVE + "[later]\nbatch = 5", "later is .*; write it as \\[\\[later\\]\\] tables"),
        (PLAIN + 'objective = "cispo"', "objective is 'cispo'; write a table"),
        (PLAIN + "dynamic_sampling = -1" + OBJECTIVE, "dynamic_sampling must be at least 0"),
        (PLAIN + OBJECTIVE + "[[later]]\nbatch = 0", "must grow from at least 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_later_changes_hold_from_their_batch_on(tmp_path: Path) -> None:
    later = """
    [[later]]
    batch = 4
    learning_rate = 1e-5
    max_grad_norm = 0.5
    [[later]]
    batch = 8
    objective = { name = "cispo", ratio_max = 3.0 }
    """
    settings = read(tmp_path, PLAIN + OBJECTIVE + later)
    seen = [settings.at(batch) for batch in (0, 3, 4, 7, 8, 100)]
    assert [s.learning_rate for s in seen] == [5e-5, 5e-5, 1e-5, 1e-5, 1e-5, 1e-5]
    assert [s.max_grad_norm for s in seen] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert [s.objective.ratio_max for s in seen] == [5.0, 5.0, 5.0, 5.0, 3.0, 3.0]


def test_objectives_have_their_bounds_from_the_table() -> None:
    assert read_objective({"name": "dapo"}) == DAPO()
    assert read_objective({"name": "dapo", "trust_max": 1.5}) == DAPO(trust_max=1.5)


REPORT = tuple(1000 * k for k in (40, 48, 56, 64, 72, 80))


def test_both_indicators_are_needed() -> None:
    settled, moving = [2.0] * 6, [2.0, 1.8, 1.6, 1.4, 1.2, 1.0]
    for perplexities, length, stage in ((settled, 39_000, 1), (settled, 20_000, 0), (moving, 39_000, 0)):
        window = StagedWindow(REPORT)
        for perplexity in perplexities:
            window.observe(perplexity=perplexity, length_p99=length)
        assert window.stage == stage


def test_every_stage_waits_for_its_own_perplexity_and_the_last_one_stays() -> None:
    window = StagedWindow(REPORT, patience=3)
    sizes = []
    for _ in range(30):
        sizes.append(window.size)
        window.observe(perplexity=2.0, length_p99=0.95 * window.size)
    assert sizes == sorted(size for size in REPORT for _ in range(4))[:20] + [80_000] * 10


def test_the_report_of_a_batch_is_of_the_window_it_was_drawn_in() -> None:
    window = StagedWindow((4, 8), patience=1)
    window.observe(perplexity=1.0, length_p99=4)
    assert window.observe(perplexity=1.0, length_p99=4) == {
        "window": 4,
        "window_converged": 1.0,
        "window_near": 1.0,
    }
    assert window.size == 8


@pytest.mark.parametrize("sizes", [(), (0, 4), (8, 4), (4, 4)])
def test_windows_that_do_not_grow_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be positive and grow"):
        StagedWindow(sizes)
