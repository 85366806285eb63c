"""A settings file says everything once, and what it says wrongly is named."""

from pathlib import Path

import pytest

from minimax_hybrid.rl.objective import CISPO, DAPO
from minimax_hybrid.rl.settings import TrainSettings, read_objective, read_settings

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
