"""Claims about whole runs on a toy task: reward rises, a kill changes nothing, nothing non-finite is stepped
on."""

import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from tiny import LETTERS, letters, letters_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import logging

from minimax_hybrid.rl.diagnostics import NonFiniteError
from minimax_hybrid.rl.objective import CISPO, DAPO, GRPO, REINFORCE, policy_loss
from minimax_hybrid.rl.run_folder import read_log
from minimax_hybrid.rl.settings import Later
from minimax_hybrid.rl.tasks import Problem
from minimax_hybrid.rl.trainer import Task, Trainer, find_task, train_from_file


def trainer(folder: Path, task: Task = toy.say_a, **changes: object) -> Trainer:
    return Trainer(letters(), letters_tokenizer(), task, toy.settings(folder, **changes))


def log(folder: Path, kind: str | None = None) -> list[dict]:
    """Lines of a kind, without the one value that no seed fixes."""
    lines = [line for line in read_log(folder / "log.jsonl") if kind in (None, line["kind"])]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def judged(verify: Callable[[str], float]) -> Task:
    return lambda rng, level: Problem("bcd" + rng.choice("bcdef"), verify)


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def test_reward_rises_and_the_log_says_how(tmp_path: Path) -> None:
    trainer(tmp_path, batches=12).train()
    batches, updates = log(tmp_path, "batch"), log(tmp_path, "update")
    assert batches[0]["reward"] < 0.4
    assert batches[-1]["reward"] > 0.8
    assert [line["batch"] for line in batches] == list(range(12))
    assert [line["step"] for line in updates] == list(range(1, 49))
    on_policy = [line for line in updates if line["update"] == 0]
    assert all(line["rollout_log_ratio_max"] < 1e-4 for line in on_policy)
    assert all(line["rollout_correlation"] > 0.9999 for line in on_policy)
    assert any(abs(line["ratio_largest"] - 1) > 1e-3 for line in updates if line["update"] == 3)
    assert {line["batch"] for line in log(tmp_path, "evaluation")} == {0, 12}


def test_one_seed_gives_one_run_and_another_seed_another(tmp_path: Path) -> None:
    runs = {}
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        trainer(tmp_path / name, batches=2, seed=seed).train()
        runs[name] = log(tmp_path / name)
    assert runs["one"] == runs["two"]
    assert runs["one"] != runs["three"]


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


def kill_at(count: int) -> Callable[[], None]:
    """Raises on the call of that number."""
    calls = iter(range(1, 10_000))

    def tick(*_: object) -> None:
        if next(calls) == count:
            raise Killed

    return tick


def interrupt(monkeypatch: pytest.MonkeyPatch, place: str, count: int) -> None:
    """Let the process die at the count-th use of one operation."""
    owner, name = {
        "between updates": (torch.optim.AdamW, "step"),
        "before the checkpoint gets its name": (Path, "rename"),
        "while the optimiser is written": (torch, "save"),
        "while an old checkpoint is removed": (shutil, "rmtree"),
        "while sampling": (torch, "searchsorted"),
    }[place]
    original, tick = getattr(owner, name), kill_at(count)

    def dying(*args: object, **options: object) -> object:
        tick()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, dying)


@pytest.mark.parametrize(
    ("place", "count"),
    [
        ("between updates", 7),
        ("before the checkpoint gets its name", 2),
        ("while the optimiser is written", 3),
        ("while an old checkpoint is removed", 4),
        ("while sampling", 31),
    ],
)
def test_a_run_that_dies_anywhere_goes_on_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, count: int
) -> None:
    whole = trainer(tmp_path / "whole", batches=4)
    whole.train()
    with monkeypatch.context() as patch:
        interrupt(patch, place, count)
        with pytest.raises(Killed):
            trainer(tmp_path / "cut", batches=4).train()
    again = trainer(tmp_path / "cut", batches=4)
    again.train()
    assert log(tmp_path / "cut") == log(tmp_path / "whole")
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(again)[name]), name


def _run_and_die(folder: Path) -> None:
    problems = iter(range(10_000))

    def deadly(rng: random.Random, difficulty: int) -> Problem:
        if next(problems) == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return toy.say_a(rng, difficulty)

    torch.set_num_threads(1)
    trainer(folder, task=deadly, batches=4).train()


@pytest.mark.slow
def test_a_killed_process_leaves_a_run_that_continues(tmp_path: Path) -> None:
    trainer(tmp_path / "whole", batches=4).train()
    process = multiprocessing.get_context("spawn").Process(target=_run_and_die, args=(tmp_path / "cut",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with (tmp_path / "cut" / "log.jsonl").open("a") as file:
        file.write('{"kind": "update", "bat')  # a line that the kill cut short
    trainer(tmp_path / "cut", batches=4).train()
    assert log(tmp_path / "cut") == log(tmp_path / "whole")


def test_a_finished_run_goes_on_with_more_batches_and_refuses_other_settings(tmp_path: Path) -> None:
    trainer(tmp_path / "whole", batches=4).train()
    trainer(tmp_path / "parts", batches=2).train()
    place = trainer(tmp_path / "parts", batches=4).train()
    assert log(tmp_path / "parts", "update") == log(tmp_path / "whole", "update")
    assert place.name == "000004"
    with pytest.raises(ValueError, match="another learning_rate"):
        trainer(tmp_path / "parts", batches=5, learning_rate=1e-3).train()


def test_a_checkpoint_is_a_model_that_loads_by_itself(tmp_path: Path) -> None:
    run = trainer(tmp_path, batches=1)
    place = run.train()
    loaded = type(run.model).from_pretrained(place)
    for name, value in weights(run).items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert [path.name for path in place.parent.iterdir()] == ["000001"]


def test_a_gradient_that_is_not_finite_stops_the_run_and_is_explained(tmp_path: Path) -> None:
    run = Trainer(letters(layers=8), letters_tokenizer(), toy.say_a, toy.settings(tmp_path, batches=3))
    zero = LETTERS.index("c")
    original = run.one_step
    before = {}

    def break_the_second_batch(update: int, *rest: object) -> None:
        if run.batches_done == 1 and update == 0:
            with torch.no_grad():
                run.model.model.embed_tokens.weight[zero] = 0
        before.update(weights(run))
        original(update, *rest)

    run.one_step = break_the_second_batch
    with pytest.raises(
        NonFiniteError, match=f"batch 1, update .*parameters model\\..*after id {zero}"
    ) as raised:
        run.train()
    assert "000001" in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in weights(run).items())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000001"]


def test_a_verifier_that_raises_loses_no_rollout_and_does_not_stop_the_run(tmp_path: Path) -> None:
    calls = iter(range(10_000))

    def fragile(rng: random.Random, difficulty: int) -> Problem:
        problem = toy.say_a(rng, difficulty)

        def verify(text: str) -> float:
            if next(calls) % 5 == 0:
                raise ZeroDivisionError("no such judge")
            return problem.verify(text)

        return Problem(problem.prompt, verify)

    run = trainer(tmp_path, task=fragile, batches=2)
    run.evaluate = lambda: 0.0
    run.train()
    lost = [json.loads(line) for line in (tmp_path / "unscored.jsonl").read_text().splitlines()]
    batches = log(tmp_path, "batch")
    assert sum(line["verifier_failures"] for line in batches) == len(lost) > 0
    assert all(line["responses"] + line["verifier_failures"] == 16 for line in batches)
    assert lost[0]["error"] == "ZeroDivisionError: no such judge"
    assert lost[0]["tokens"]


@pytest.mark.parametrize("error", [RuntimeError("down"), SystemExit(1)])
def test_a_verifier_that_always_raises_trains_on_nothing(tmp_path: Path, error: BaseException) -> None:
    def broken(text: str) -> float:
        raise error

    run = trainer(tmp_path, task=judged(broken), batches=1)
    before = weights(run)
    run.evaluate = lambda: 0.0
    run.train()
    assert log(tmp_path, "update") == []
    assert all(torch.equal(value, before[name]) for name, value in weights(run).items())
    assert len((tmp_path / "unscored.jsonl").read_text().splitlines()) == 16


def test_a_reward_that_is_not_finite_is_refused_by_row_and_the_batch_is_kept(tmp_path: Path) -> None:
    run = trainer(tmp_path, task=judged(lambda text: float("nan")))
    run.evaluate = lambda: 0.0
    with pytest.raises(ValueError, match="rewards of responses \\[0, 1, .*unscored.jsonl"):
        run.train()
    assert len((tmp_path / "unscored.jsonl").read_text().splitlines()) == 16


def test_a_reward_that_stops_a_later_draw_keeps_the_responses_of_the_earlier_ones(tmp_path: Path) -> None:
    calls = iter(range(10_000))

    def judge(text: str) -> float:
        return 0.5 if next(calls) < 16 else float("nan")

    run = trainer(tmp_path, task=judged(judge), dynamic_sampling=3)
    run.evaluate = lambda: 0.0
    with pytest.raises(ValueError, match="are not finite"):
        run.train()
    kept = [json.loads(line) for line in (tmp_path / "unscored.jsonl").read_text().splitlines()]
    assert [line.get("reward") for line in kept] == [None] * 16 + [0.5] * 16
    assert all(line["tokens"] for line in kept)


def test_groups_whose_spread_is_clipped_away_are_drawn_anew(tmp_path: Path) -> None:
    lengthy = judged(lambda text: 2.0 + len(text))
    trainer(tmp_path, task=lengthy, batches=1, dynamic_sampling=2, reward_range=(0.0, 1.0)).train()
    (batch,) = log(tmp_path, "batch")
    assert (batch["responses"], batch["trained"]) == (48, 0)


def test_micro_batches_change_memory_and_not_the_run(tmp_path: Path) -> None:
    for name, rows in (("whole", 256), ("parts", 3)):
        trainer(tmp_path / name, batches=1, updates=1, micro_batch=rows).train()
    whole, parts = (log(tmp_path / name, "update")[0] for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert whole.pop("kind") == parts.pop("kind") == "update"
    for name, value in whole.items():
        assert parts[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


class CountedSorts(TorchDispatchMode):
    """Counts sorts of real numbers, which metrics need for quantiles and nothing else in a step does."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.aten.sort.default and args[0].is_floating_point()
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro_batch", [2, 16])
def test_metrics_are_computed_once_a_step(tmp_path: Path, micro_batch: int) -> None:
    run = trainer(tmp_path, batches=1, updates=2, micro_batch=micro_batch)
    counts, original = [], run.one_step

    def counted_step(*given: Any) -> None:
        with CountedSorts() as sorts:
            original(*given)
        counts.append(sorts.count)

    run.one_step = counted_step
    run.train()
    assert counts == [1, 1]


def test_evaluation_needs_no_run(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run")
    accuracy = run.evaluate()
    assert 0.0 <= accuracy <= 1.0
    assert not (tmp_path / "run" / "log.jsonl").exists()
    assert accuracy == run.evaluate()


def test_dynamic_sampling_trains_on_groups_with_spread_only(tmp_path: Path) -> None:
    def sometimes(rng: random.Random, difficulty: int) -> Problem:
        problem = toy.say_a(rng, difficulty)
        return Problem(problem.prompt, problem.verify if problem.prompt[0] in "bc" else lambda text: 1.0)

    trainer(tmp_path / "one", task=sometimes, batches=1, dynamic_sampling=0).train()
    trainer(tmp_path / "more", task=sometimes, batches=1, dynamic_sampling=10).train()
    one, more = (log(tmp_path / name, "batch")[0] for name in ("one", "more"))
    assert one["responses"] == 16
    assert one["trained"] < 16
    assert more["responses"] > 16
    assert more["trained"] == 16


def test_the_window_grows_when_both_indicators_say_so(tmp_path: Path) -> None:
    run = trainer(tmp_path, batches=4, windows=(4, 8), overlong_ramp=2, learning_rate=1e-6)
    run.window.patience, run.window.perplexity_change, run.window.near = 1, 1.0, 0.1
    run.train()
    assert [line["window"] for line in log(tmp_path, "batch")] == [4, 4, 8, 8]


def test_replayed_routing_and_the_other_objectives_run(tmp_path: Path) -> None:
    for name, objective in (("dapo", DAPO()), ("grpo", GRPO()), ("reinforce", REINFORCE())):
        options = dict(replay_routing=True, reward_range=(0.0, 0.5), repetition_run=3)
        trainer(tmp_path / name, batches=1, objective=objective, **options).train()
        first = log(tmp_path / name, "update")[0]
        assert first["rollout_log_ratio_max"] < 1e-4


def test_a_kl_term_holds_the_policy_near_the_one_that_the_run_began_with(tmp_path: Path) -> None:
    logs = {}
    for name, coefficient, parts in (("free", 1e-9, [8]), ("held", 10.0, [8]), ("resumed", 10.0, [3, 8])):
        for batches in parts:
            objective = GRPO(kl_coefficient=coefficient)
            trainer(tmp_path / name, batches=batches, objective=objective).train()
        logs[name] = [line["kl_reference"] for line in log(tmp_path / name, "update")]
    assert logs["held"][0] == pytest.approx(0.0, abs=1e-9)
    assert logs["free"][-1] > 10 * logs["held"][-1] > 0
    assert logs["resumed"] == logs["held"]


def test_later_settings_come_into_force_at_their_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = Later(batch=2, learning_rate=1e-3, max_grad_norm=1e-4, objective=CISPO(ratio_max=1.0))
    run = trainer(tmp_path, batches=3, later=(change,), seed=1)
    losses, steps = set(), []

    def watched_loss(*given: object, **options: object) -> object:
        losses.add((run.batches_done, given[4]))
        return policy_loss(*given, **options)

    def watched_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in run.parameters]))
        steps.append((run.batches_done, optimizer.param_groups[0]["lr"], norm))

    monkeypatch.setattr("minimax_hybrid.rl.trainer.policy_loss", watched_loss)
    run.optimizer.register_step_pre_hook(watched_step)
    run.train()
    assert losses == {(0, CISPO(ratio_max=5.0)), (1, CISPO(ratio_max=5.0)), (2, CISPO(ratio_max=1.0))}
    assert {(done, rate) for done, rate, _ in steps} == {(0, 3e-3), (1, 3e-3), (2, 1e-3)}
    assert all(norm == pytest.approx(1e-4, rel=1e-4) for done, _, norm in steps if done == 2)
    assert all(norm > 1e-2 for done, _, norm in steps if done < 2)
    clipped = [line["batch"] for line in log(tmp_path, "update") if line["clipped_positive"] > 0]
    assert set(clipped) == {2}


def test_every_update_is_made_where_responses_do_not_divide_evenly(tmp_path: Path) -> None:
    trainer(tmp_path, batches=1, prompts=5, responses=8, updates=16).train()
    assert len(log(tmp_path, "update")) == 16


def test_the_policy_in_half_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train in float32.*bfloat16"):
        Trainer(letters().bfloat16(), letters_tokenizer(), toy.say_a, toy.settings(tmp_path))


def test_tasks_are_found_by_name() -> None:
    assert find_task("toy:say_a") is toy.say_a
    assert find_task("sudoku").__name__ == "sudoku"
    with pytest.raises(ValueError, match="name your own"):
        find_task("chess")


def test_a_settings_file_is_a_run(tmp_path: Path) -> None:
    letters().save_pretrained(tmp_path / "model")
    letters_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(
        f"""
        model = "{tmp_path / "model"}"
        output = "{tmp_path / "run"}"
        task = "toy:say_a"
        difficulty = 3
        learning_rate = 1e-3
        batches = 1
        windows = [4]
        prompts = 2
        responses = 2
        updates = 2
        evaluation_problems = 2

        [objective]
        name = "cispo"
        ratio_max = 5.0
        """
    )
    bars = logging.is_progress_bar_enabled()
    place = train_from_file(tmp_path / "run.toml")
    assert logging.is_progress_bar_enabled() == bars
    assert (place / "model.safetensors").exists()
    assert len(log(tmp_path / "run", "update")) == 2
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="there is no .*model; give the folder of a checkpoint"):
        train_from_file(tmp_path / "run.toml")


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    for batches in (1, 2):
        trainer(tmp_path, batches=batches, tensorboard=True).train()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    seen = [event.value for event in events.Scalars("batch/reward")]
    assert seen == pytest.approx([line["reward"] for line in log(tmp_path, "batch")])
    losses = [event.value for event in events.Scalars("update/loss")]
    assert losses == pytest.approx([line["loss"] for line in log(tmp_path, "update")])
