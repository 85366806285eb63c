"""Reinforcement learning on one machine, in one loop (M1 report, section 3): sample, grade, update, log.

    for every batch:
        problems  -> G responses each, with their log-probabilities        rollout.sample
        responses -> rewards -> advantages relative to the group           tasks, advantages
        16 optimiser steps, each on another part of the batch              objective.policy_loss

AdamW has the report's betas (0.9, 0.95) and eps 1e-15 and a float32 state: most gradients there were below
1e-14. The report gives no learning rate, weight decay (none here) or threshold of gradient clipping for this
stage; `TrainSettings.later` changes rate and threshold at a batch of your choice.

Every random choice of batch n follows from the seed and n alone, so a run that was killed continues from its
last checkpoint to the numbers it would have had.
"""

import copy
import importlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..text import DEMO, load_model, load_tokenizer
from .advantages import clip_rewards, group_advantages, has_reward_spread, overlong_penalty
from .batches import Response, batch_log_probs, collate, lengths_of
from .diagnostics import NonFiniteError, batch_metrics, locate_non_finite, step_metrics
from .grading import Graded, append_unscored, grade, response_text
from .objective import policy_loss
from .rollout import SamplingParams, sample
from .run_folder import Logs, load_checkpoint, newest_checkpoint, record_settings, save_checkpoint
from .settings import StagedWindow, TrainSettings, read_settings
from .tasks import TASKS, Problem, draw

Task = Callable[[random.Random, int], Problem]


def train_from_file(path: Path | str) -> Path:
    """Run a settings file, continuing what its output folder holds; returns the last checkpoint."""
    settings = read_settings(path)
    source = DEMO if settings.model == "demo" else settings.model
    model = load_model(source, dtype="float32", device=settings.device)
    return Trainer(model, load_tokenizer(source), find_task(settings.task), settings).train()


def find_task(name: str) -> Task:
    """A shipped task, or any function (random.Random, difficulty) -> Problem named as "module:function"."""
    if name in TASKS:
        return TASKS[name]
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"task {name!r} is not one of {sorted(TASKS)}; name your own as 'module:function'")
    return getattr(importlib.import_module(module), function)


class Trainer:
    """The loop, and what it needs: model, tokenizer, task, settings, optimiser, window, logs.

    The model it is given is the policy that the run begins with, which a KL term refers to, also where the
    run continues from a checkpoint.
    """

    logs: Logs

    def __init__(self, model: PreTrainedModel, tokenizer: Any, task: Task, settings: TrainSettings):
        narrow = {str(p.dtype) for p in model.parameters() if p.requires_grad and p.dtype != torch.float32}
        if narrow:
            raise ValueError(
                f"train in float32: small updates are lost in {sorted(narrow)}; load with dtype=torch.float32"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token: responses could not end")
        self.model, self.tokenizer, self.task, self.settings = model, tokenizer, task, settings
        self.device = next(model.parameters()).device
        self.pad_token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.0
        )
        self.reference: PreTrainedModel | None = None
        if settings.wants_reference:
            self.reference = copy.deepcopy(model).eval().requires_grad_(False)
        self.window = StagedWindow(settings.windows)
        self.folder = Path(settings.output)
        self.checkpoints = self.folder / "checkpoints"
        self.batches_done = self.step = 0

    def train(self) -> Path:
        """Run to the last batch; returns its checkpoint."""
        settings = self.settings
        self.resume()
        bar = tqdm(initial=self.batches_done, total=settings.batches, desc="batches", disable=None)
        while self.batches_done < settings.batches:
            if self.batches_done % settings.evaluate_every == 0:
                self.log_evaluation()
            bar.set_postfix_str(f"reward {self.one_batch():.3f}")
            bar.update()
            if self.batches_done % settings.save_every == 0:
                self.save()
        self.log_evaluation()
        bar.close()
        self.logs.close()
        return self.save()

    def one_batch(self) -> float:
        """Sample, grade, update, log; returns the mean reward."""
        started = time.monotonic()
        choices = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.batches_done)
        ramp, window = self.settings.overlong_ramp, self.window.size
        drawn, trained = self.collect(choices)
        rewards = trained.rewards
        if ramp:
            rewards = rewards + overlong_penalty(lengths_of(trained.responses), length_max=window, ramp=ramp)
        advantages = group_advantages(rewards, trained.group_ids)
        order = torch.randperm(len(advantages), generator=choices)
        parts = order.tensor_split(min(self.settings.updates, len(order))) if len(order) else []
        for update, part in enumerate(parts):
            self.one_step(update, [trained.responses[i] for i in part.tolist()], advantages[part])
        self.log_batch(drawn, trained, time.monotonic() - started)
        self.batches_done += 1
        return float(drawn.rewards.mean()) if len(drawn.rewards) else 0.0

    def collect(self, choices: torch.Generator) -> tuple[Graded, Graded]:
        """All graded responses of this batch, and those to train on.

        With dynamic sampling these are groups with spread. Where a reward stops the run, what was graded
        before goes to `unscored.jsonl`.
        """
        settings = self.settings
        seeds = torch.randint(2**62, (2,), generator=choices).tolist()
        problems_from = random.Random(seeds[0])
        generator = torch.Generator(self.device).manual_seed(seeds[1])
        drawn = Graded.nothing()
        for _ in range(1 + (settings.dynamic_sampling or 0)):
            problems = draw(self.task, problems_from, difficulty=settings.difficulty, count=settings.prompts)
            try:
                graded = self.sample_and_grade(
                    problems, self.sampling, num_generations=settings.responses, generator=generator
                )
            except ValueError:
                append_unscored(drawn, self.unscored)
                raise
            if settings.reward_range:
                low, high = settings.reward_range
                graded = replace(graded, rewards=clip_rewards(graded.rewards, low=low, high=high))
            drawn = drawn + graded
            if settings.dynamic_sampling is None:
                return drawn, drawn
            useful = drawn.group_ids[has_reward_spread(drawn.rewards, drawn.group_ids)].unique()
            if len(useful) >= settings.prompts:
                break
        return drawn, drawn.select(torch.isin(drawn.group_ids, useful[: settings.prompts]))

    def sample_and_grade(
        self,
        problems: list[Problem],
        sampling: SamplingParams,
        *,
        num_generations: int = 1,
        generator: torch.Generator | None = None,
    ) -> Graded:
        """A verifier that raises costs its response, which goes to `unscored.jsonl`, and nothing else."""
        prompts = [self.tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems]
        responses = sample(
            self.model, prompts, sampling, num_generations=num_generations, generator=generator
        )
        texts = [response_text(self.tokenizer, response) for response in responses]
        reward = self.settings.format_reward
        return grade(problems, responses, texts, format_reward=reward, unscored=self.unscored)

    def one_step(self, update: int, responses: list[Response], advantages: Tensor) -> None:
        """One optimiser step on these responses."""
        settings = self.settings.at(self.batches_done)
        self.optimizer.zero_grad()
        loss, scored = self.backward(responses, advantages)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not (math.isfinite(loss) and norm.isfinite()):
            self.raise_non_finite(update, loss, responses)
        if norm > settings.max_grad_norm:
            # PyTorch's clipping adds 1e-6 to the norm, which may be more than all of the report's gradients
            shrink = settings.max_grad_norm / norm
            for gradient in gradients:
                gradient.mul_(shrink)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate
        self.optimizer.step()
        self.step += 1
        self.log_update(update, loss, float(norm), scored)

    def backward(self, responses: list[Response], advantages: Tensor) -> tuple[float, dict[str, Tensor]]:
        """Add the gradients of the loss, by micro-batches that change only memory.

        Returns:
            The loss, and (N,) tensors of what `step_metrics` reads about the response tokens.
        """
        settings = self.settings.at(self.batches_done)
        lengths = lengths_of(responses)
        whole = (float(lengths.sum()), float((lengths > 0).sum()))
        losses, scored, masks = [], [], []
        for indices in torch.arange(len(responses)).split(settings.micro_batch):
            batch = collate(
                [responses[i] for i in indices.tolist()], pad_token=self.pad_token, device=self.device
            )
            log_probs, entropy = batch_log_probs(self.model, batch, replay_routing=settings.replay_routing)
            A, mask = advantages[indices].to(self.device), batch.response_mask
            tokens = {
                "token": batch.input_ids,
                "log_prob": log_probs.detach(),
                "old_log_prob": batch.old_log_probs,
                "advantage": A[:, None].expand_as(mask),
                "entropy": entropy.detach(),
            }
            if self.reference is not None:
                with torch.no_grad():  # through the reference's own experts
                    tokens["ref_log_prob"] = batch_log_probs(self.reference, batch)[0]
            loss = policy_loss(
                log_probs,
                batch.old_log_probs,
                A,
                mask,
                settings.objective,
                normaliser=whole,
                ref_log_probs=tokens.get("ref_log_prob"),
            )
            loss.backward()
            losses.append(loss.detach())
            masks.append(mask)
            scored.append(tokens)
        joined = {
            name: torch.cat([tokens[name][mask] for tokens, mask in zip(scored, masks, strict=True)])
            for name in scored[0]
        }
        # Summed by Python, in float64, after one transfer.
        return sum(torch.stack(losses).tolist(), 0.0), joined

    def raise_non_finite(self, update: int, loss: float, responses: list[Response]) -> NoReturn:
        found = locate_non_finite(
            self.model, responses, pad_token=self.pad_token, replay_routing=self.settings.replay_routing
        )
        raise NonFiniteError(
            f"batch {self.batches_done}, update {update}: loss {loss}, gradient not finite; {found}. No step "
            f"was made; the last good checkpoint is {newest_checkpoint(self.checkpoints)}"
        )

    def evaluate(self) -> float:
        """Share of held-out problems that the likeliest response solves; the same problems every time."""
        settings = self.settings
        problems = draw(
            self.task,
            random.Random(0),
            difficulty=settings.difficulty,
            count=settings.evaluation_problems,
            held_out_only=True,
        )
        rewards = self.sample_and_grade(problems, replace(self.sampling, greedy=True)).rewards
        return int((rewards == 1.0).sum()) / len(problems)

    @property
    def sampling(self) -> SamplingParams:
        settings = self.settings
        return SamplingParams(
            end_tokens=(self.tokenizer.eos_token_id,),
            pad_token=self.pad_token,
            max_new_tokens=self.window.size,
            temperature=settings.temperature,
            repetition_run=settings.repetition_run,
            output_routed_experts=settings.replay_routing,
        )

    @property
    def unscored(self) -> Path:
        return self.folder / "unscored.jsonl"

    def log_evaluation(self) -> None:
        accuracy = self.evaluate()
        values = {"greedy_accuracy": accuracy}
        self.logs.write("evaluation", self.batches_done, step=self.step, values=values)
        count = self.settings.evaluation_problems
        tqdm.write(f"batch {self.batches_done}: greedy accuracy {accuracy:.3f} on {count} held-out problems")

    def log_batch(self, drawn: Graded, trained: Graded, seconds: float) -> None:
        values = batch_metrics(drawn) | {"trained": len(trained.responses), "seconds": seconds}
        if drawn.responses:
            values |= self.window.observe(perplexity=values["perplexity"], length_p99=values["length_p99"])
        self.logs.write("batch", self.batches_done, step=self.step, values=values)

    def log_update(self, update: int, loss: float, norm: float, scored: dict[str, Tensor]) -> None:
        values = {"update": update, "loss": loss, "grad_norm": norm}
        # Before the first step of a batch, training and rollout are the same policy.
        objective = self.settings.at(self.batches_done).objective
        values |= step_metrics(scored, objective, on_policy=update == 0)
        self.logs.write("update", self.batches_done, step=self.step, values=values)

    def save(self) -> Path:
        window = {"stage": self.window.stage, "perplexities": self.window.perplexities}
        return save_checkpoint(
            self.checkpoints,
            self.batches_done,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            state={"done": self.batches_done, "step": self.step, "window": window},
        )

    def resume(self) -> None:
        """Open the run's folder and continue from its last checkpoint, if it has one.

        Raises:
            ValueError: the folder holds a run with other settings (more batches, or saving at other times,
                is fine).
        """
        free = ("batches", "save_every", "tensorboard", "output")
        record_settings(self.folder, {k: v for k, v in asdict(self.settings).items() if k not in free})
        if checkpoint := newest_checkpoint(self.checkpoints):
            state = load_checkpoint(checkpoint, model=self.model, optimizer=self.optimizer)
            self.batches_done, self.step = state["done"], state["step"]
            self.window = replace(self.window, **state["window"])
        self.logs = Logs(
            self.folder, first=self.batches_done, step=self.step, tensorboard=self.settings.tensorboard
        )
