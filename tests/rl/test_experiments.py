"""The experiments under benchmarks/policy run from end to end at the size of a toy, and their page is up to
date."""

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.policy import adam, addition, head, objectives, page, records
from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.rl.objective import DAPO
from minimax_hybrid.rl.settings import read_settings
from minimax_hybrid.rl.tasks import Problem

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from demo_corpus import build_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that knows nothing, with the demo's tokenizer."""
    place = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = MiniMaxM1Config.tiny(
        vocab_size=len(tokenizer), num_hidden_layers=2, attn_type_list=[0, 1], hidden_size=32,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    MiniMaxM1ForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one batch: four problems, two responses, two updates."""
    few = dataclasses.replace(
        read_settings(addition.SETTINGS),
        batches=1,
        prompts=4,
        responses=2,
        updates=2,
        evaluation_problems=4,
        dynamic_sampling=None,
    )
    monkeypatch.setattr(addition, "read_settings", lambda _: few)
    monkeypatch.setattr(adam, "read_settings", lambda _: few)


def test_the_settings_that_the_readme_names_are_read() -> None:
    assert read_settings(addition.SETTINGS).objective.ratio_max == 5.0


def some_reward(rng: random.Random, digits: int) -> Problem:
    """One that a model which knows nothing earns half of the time."""
    return Problem(f"{rng.randrange(10)}+1=", lambda text: float(sum(map(ord, text)) % 2))


def test_addition_and_adam_run(folder: str, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = addition.run(folder, seed=3)
    assert [row["batch"] for row in rows if "greedy" in row] == [0, 1]

    monkeypatch.setattr(adam, "find_task", lambda name: some_reward)
    median = {}
    for scale in adam.SCALES:
        counts = torch.tensor(adam.run(folder, "report", scale, batches=1, seed=0)[-1]["gradients"])
        assert counts[1:].sum() > 1000
        median[scale] = int((counts[1:].cumsum(0) * 2 < counts[1:].sum()).sum())  # of those that are not 0
    assert median[1.0] - median[1e-10] == 10  # a bin is a decade


def test_objectives_run_and_count_dropped_tokens(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MiniMaxM1ForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    steps = objectives.supervised(model, tokenizer, random.Random(0), digits=1, steps=10, says_wait=0.5)
    losses = list(steps)
    assert losses[-1] < losses[0]
    easy = dataclasses.replace(objectives.COMPARISONS["recheck"], task=some_reward)
    monkeypatch.setitem(objectives.COMPARISONS, "recheck", easy)
    monkeypatch.setitem(objectives.OBJECTIVES, "dapo", DAPO(trust_min=1.0, trust_max=1.0))
    rows = objectives.run("recheck", "dapo", 0, start=Path(folder), batches=1)
    assert rows[0]["batch"] == 0
    counts = rows[-1]["dropped_and_seen_by_token"]
    dropped, seen = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
    assert dropped / seen == pytest.approx(rows[0]["dropped"])
    assert 0 < dropped < seen


def test_a_right_answer_after_wait_earns_most() -> None:
    problem = objectives.recheck(random.Random(0), 3)
    plain = problem.answer.removeprefix("wait ")
    rewards = [problem.reward(text) for text in (problem.answer, plain, "wait " + plain + "0", "wait", "")]
    assert rewards == [1.0, 0.2, 0.0, 0.0, 0.0]


def test_the_head_is_measured_in_every_combination(folder: str) -> None:
    rows = list(head.measure(folder, rows=4, tokens=12))
    compared = [row for row in rows if "correlation" in row]
    assert len(compared) == 12
    assert all(row["correlation"] > 0.99 for row in compared)
    assert [row["layer"] for row in rows if row.get("layer") is not None and row["body"] == "float32"] == [
        0,
        1,
        2,
    ]


def test_the_page_is_what_the_rows_say() -> None:
    text = page.PAGE.read_text()
    assert page.filled(text) == text


def test_jobs_in_several_processes_come_back_in_order() -> None:
    assert list(records.each(divmod, [(7, 2), (9, 4), (5, 5)], processes=2)) == [(3, 1), (2, 1), (1, 0)]
