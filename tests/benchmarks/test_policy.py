"""The experiments with the policy run from end to end at the size of a toy."""

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.cases import policy_adam, policy_addition, policy_head, policy_objectives
from benchmarks.harness import policy
from benchmarks.harness.measure import each
from benchmarks.harness.rows import Row, measured
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
        read_settings(policy_addition.SETTINGS),
        batches=1,
        prompts=4,
        responses=2,
        updates=2,
        evaluation_problems=4,
        dynamic_sampling=None,
    )
    monkeypatch.setattr(policy_addition, "read_settings", lambda _: few)
    monkeypatch.setattr(policy_adam, "read_settings", lambda _: few)


def test_the_settings_that_the_readme_names_are_read() -> None:
    assert read_settings(policy_addition.SETTINGS).objective.ratio_max == 5.0


def some_reward(rng: random.Random, digits: int) -> Problem:
    """One that a model which knows nothing earns half of the time."""
    return Problem(f"{rng.randrange(10)}+1=", lambda text: float(sum(map(ord, text)) % 2))


def test_addition_and_adam_run(folder: str, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = policy_addition.train(folder, seed=3)
    assert {row.metric: row.at for row in rows} == {
        "reward": (0,), "length": (0,), "greedy": (0, 1), "seconds": (0, 1)
    }  # fmt: skip

    monkeypatch.setattr(policy, "find_task", lambda name: some_reward)
    median = {}
    for scale in policy_adam.SCALES:
        counts = torch.tensor(policy_adam.train(folder, "report", scale, batches=1, seed=0)[-1].values)
        assert counts[1:].sum() > 1000
        median[scale] = int((counts[1:].cumsum(0) * 2 < counts[1:].sum()).sum())  # of those that are not 0
    assert median[1.0] - median[1e-10] == 10  # a bin is a decade


def test_objectives_run_and_count_dropped_tokens(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MiniMaxM1ForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lessons = dict(digits=1, steps=10, says_wait=0.5)
    losses = list(policy_objectives.supervised(model, tokenizer, random.Random(0), **lessons))
    assert losses[-1] < losses[0]
    easy = dataclasses.replace(policy_objectives.COMPARISONS["recheck"], task=some_reward)
    monkeypatch.setitem(policy_objectives.COMPARISONS, "recheck", easy)
    monkeypatch.setitem(policy_objectives.OBJECTIVES, "dapo", DAPO(trust_min=1.0, trust_max=1.0))
    rows = policy_objectives.train("recheck", "dapo", 0, start=Path(folder), batches=1)
    found = {row.metric: row for row in rows}
    assert len(found["greedy"].values) == 2 and len(found["entropy"].values) == 1
    gone, seen = found["tokens dropped"], found["tokens seen"]
    assert gone.at == seen.at and 0 < sum(gone.values) < sum(seen.values)
    assert all(0 <= a <= b for a, b in zip(gone.values, seen.values, strict=True))
    shares = found["dropped"].values[0] * sum(seen.values)
    assert shares == pytest.approx(sum(gone.values))  # the trainer's own count of what was dropped


def test_steps_are_those_until_a_curve_first_reaches_the_target() -> None:
    assert policy_objectives.steps_to((0.1, 0.5, 0.3, 0.6), 0.5) == "16"
    assert policy_objectives.steps_to((0.1, 0.2), 0.5) == "not reached"


def test_of_dropped_tokens_only_common_ones_are_listed() -> None:
    what = dict(case="policy_objectives", side="dapo", task="recheck", unit="tokens", at=("a", "b", "c"))
    rows: list[Row] = [
        measured([10, 1, 0], metric="tokens dropped", **what),
        measured([100, 1, 2000], metric="tokens seen", **what),
    ]
    assert "| dapo | `a` 10.0 % |" in policy_objectives.dropped(rows)


def test_a_right_answer_after_wait_earns_most() -> None:
    problem = policy_objectives.recheck(random.Random(0), 3)
    plain = problem.answer.removeprefix("wait ")
    rewards = [problem.reward(text) for text in (problem.answer, plain, "wait " + plain + "0", "wait", "")]
    assert rewards == [1.0, 0.2, 0.0, 0.0, 0.0]


def test_the_head_is_measured_in_every_combination(folder: str) -> None:
    rows = list(policy_head.measure(folder, responses=4, tokens=12))
    correlations = [row.p50 for row in rows if row.metric == "correlation"]
    assert len(correlations) == 12 and min(correlations) > 0.99
    equal = {row.dtype: row for row in rows if row.metric == "equal"}
    assert equal["float32"].at == ("embedding", "linear_attention", "full_attention, last norm")
    assert equal["float32"].values[0] == 1.0


@pytest.mark.slow
def test_jobs_in_several_processes_come_back_in_order() -> None:
    assert list(each(divmod, [(7, 2), (9, 4), (5, 5)], processes=2)) == [3, 1, 2, 1, 1, 0]
