"""Reinforcement learning on one machine, in one loop (M1 report, section 3): sample, grade, update, log.

    for every batch:
        problems  -> G responses each, with their log-probabilities        rollout.sample
        responses -> rewards -> advantages relative to the group           tasks, advantages
        16 optimiser steps, each on another part of the batch              objective.policy_loss

AdamW has the report's betas (0.9, 0.95) and eps 1e-15 and a float32 state: most gradients there were below
1e-14. The report gives no learning rate, weight decay (none here) or threshold of gradient clipping for this
stage; `Settings.later` changes rate and threshold at a batch of your choice.

Every random choice of batch n follows from the seed and n alone, so a run that was killed goes on from its
last checkpoint to the very numbers it would have had.
"""

import copy
import importlib
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from ..text import DEMO, load_model, load_tokenizer
from .advantages import clip_rewards, group_advantages, informative, overlong_penalty
from .batches import Batch, Response, batch_log_probs, collate
from .checkpoints import load_checkpoint, newest_checkpoint, replace_text, save_checkpoint
from .grading import Graded, grade, keep
from .logs import Logs
from .metrics import batch_metrics, lengths_of, step_metrics
from .non_finite import NonFiniteError, describe
from .objective import policy_loss
from .rollout import Sampling, sample
from .settings import Settings, read_settings
from .tasks import TASKS, Problem, draw
from .windows import StagedWindow

Task = Callable[[random.Random, int], Problem]


def train_from_file(path: Path | str) -> Path:
    """Run what a settings file says, from where its output folder stands; returns the last checkpoint."""
    settings = read_settings(path)
    logging.disable_progress_bar()  # one bar is enough
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
    """Holds what the loop needs: model, tokenizer, task, settings, optimiser, window, logs.

    The model it is given is the policy that the run begins with, which a KL term refers to, also where the
    run goes on from a checkpoint.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, task: Task, settings: Settings):
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
        self.reference = None
        if settings.wants_reference:
            self.reference = copy.deepcopy(model).eval().requires_grad_(False)
        self.window = StagedWindow(settings.windows)
        self.folder = Path(settings.output)
        self.done = self.step = 0  # batches, optimiser steps

    def train(self) -> Path:
        """Run to the last batch; returns its checkpoint."""
        settings = self.settings
        self.resume()
        self.logs = Logs(self.folder, first=self.done, step=self.step, tensorboard=settings.tensorboard)
        bar = tqdm(initial=self.done, total=settings.batches, desc="batches", disable=None)
        while self.done < settings.batches:
            if self.done % settings.evaluate_every == 0:
                self.evaluate()
            bar.set_postfix_str(f"reward {self.one_batch():.3f}")
            bar.update()
            if self.done % settings.save_every == 0:
                self.save()
        self.evaluate()
        bar.close()
        self.logs.close()
        return self.save()

    def one_batch(self) -> float:
        """Sample, grade, update, log; returns the mean reward."""
        started = time.monotonic()
        choices = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.done)
        ramp, window = self.settings.overlong_ramp, self.window.size
        drawn, trained = self.collect(choices)
        rewards = trained.rewards
        if ramp:
            rewards = rewards + overlong_penalty(lengths_of(trained.responses), length_max=window, ramp=ramp)
        advantages = group_advantages(rewards, trained.group_ids)
        order = torch.randperm(len(advantages), generator=choices)
        parts = order.tensor_split(min(self.settings.updates, len(order))) if len(order) else []
        for update, rows in enumerate(parts):
            self.one_step(update, [trained.responses[i] for i in rows.tolist()], advantages[rows])
        self.log_batch(drawn, trained, time.monotonic() - started)
        self.done += 1
        return float(drawn.rewards.mean()) if len(drawn.rewards) else 0.0

    def collect(self, choices: torch.Generator) -> tuple[Graded, Graded]:
        """All graded responses of this batch, and those to train on: with dynamic sampling, groups with
        spread."""
        settings = self.settings
        seeds = torch.randint(2**62, (2,), generator=choices).tolist()
        problems_from = random.Random(seeds[0])
        generator = torch.Generator(self.device).manual_seed(seeds[1])
        drawn = Graded([], torch.zeros(0), torch.zeros(0, dtype=torch.long))
        for _ in range(1 + (settings.dynamic_sampling or 0)):
            problems = draw(self.task, problems_from, difficulty=settings.difficulty, count=settings.prompts)
            responses = sample(
                self.model,
                self.encode(problems),
                self.sampling,
                copies=settings.responses,
                generator=generator,
            )
            graded = self.grade(problems, responses, before=drawn)
            if settings.reward_range:
                low, high = settings.reward_range
                graded = replace(graded, rewards=clip_rewards(graded.rewards, low=low, high=high))
            drawn = drawn + graded
            if settings.dynamic_sampling is None:
                break
            useful = informative(drawn.rewards, drawn.group_ids)
            if len(drawn.group_ids[useful].unique()) >= settings.prompts:
                break
        if settings.dynamic_sampling is None:
            return drawn, drawn
        useful = informative(drawn.rewards, drawn.group_ids)
        first = drawn.group_ids[useful].unique()[: settings.prompts]
        return drawn, drawn.only(torch.isin(drawn.group_ids, first))

    def one_step(self, update: int, responses: list[Response], advantages: Tensor) -> None:
        """One optimiser step on these responses, by micro-batches that change nothing but memory."""
        settings = self.settings.at(self.done)
        lengths = lengths_of(responses)
        whole = (float(lengths.sum()), float((lengths > 0).sum()))
        self.optimizer.zero_grad()
        loss, scored = 0.0, []
        for rows in torch.arange(len(responses)).split(settings.micro_batch):
            batch = collate(
                [responses[i] for i in rows.tolist()], pad_token=self.pad_token, device=self.device
            )
            log_probs, entropy = batch_log_probs(
                self.model, batch, temperature=settings.temperature, replay_routing=settings.replay_routing
            )
            A, mask = advantages[rows].to(self.device), batch.response_mask
            reference = self.reference_log_probs(batch)
            part, _ = policy_loss(
                log_probs,
                batch.old_log_probs,
                A,
                mask,
                settings.objective,
                normaliser=whole,
                ref_log_probs=reference,
            )
            part.backward()
            loss += part.item()
            every = {
                "token": batch.input_ids,
                "log_prob": log_probs.detach(),
                "old_log_prob": batch.old_log_probs,
                "advantage": A[:, None].expand_as(mask),
                "entropy": entropy.detach(),
            }
            if reference is not None:
                every["ref_log_prob"] = reference
            scored.append({name: x[mask] for name, x in every.items()})
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not (math.isfinite(loss) and norm.isfinite()):
            self.stop(update, loss, responses)
        if norm > settings.max_grad_norm:
            # PyTorch's clipping adds 1e-6 to the norm, which may be more than all of the report's gradients
            shrink = settings.max_grad_norm / norm
            for gradient in gradients:
                gradient.mul_(shrink)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate
        self.optimizer.step()
        self.step += 1
        joined = {name: torch.cat([part[name] for part in scored]) for name in scored[0]}
        self.log_update(update, loss, float(norm), joined)

    @torch.no_grad()
    def reference_log_probs(self, batch: Batch) -> Tensor | None:
        """(B, T) under the policy that the run began with, through experts of its own; None if no term needs
        it."""
        if self.reference is None:
            return None
        return batch_log_probs(self.reference, batch, temperature=self.settings.temperature)[0]

    def stop(self, update: int, loss: float, responses: list[Response]) -> None:
        found = describe(
            self.model, responses, pad_token=self.pad_token, replay_routing=self.settings.replay_routing
        )
        raise NonFiniteError(
            f"batch {self.done}, update {update}: loss {loss}, gradient not finite; {found}. No step was "
            f"made; the last good checkpoint is {newest_checkpoint(self.checkpoints)}"
        )

    @torch.no_grad()
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
        responses = sample(self.model, self.encode(problems), replace(self.sampling, greedy=True))
        accuracy = int((self.grade(problems, responses).rewards == 1.0).sum()) / len(problems)
        self.logs.write("evaluation", self.done, step=self.step, values={"greedy_accuracy": accuracy})
        tqdm.write(f"batch {self.done}: greedy accuracy {accuracy:.3f} on {len(problems)} held-out problems")
        return accuracy

    @property
    def sampling(self) -> Sampling:
        settings = self.settings
        return Sampling(
            end_tokens=(self.tokenizer.eos_token_id,),
            pad_token=self.pad_token,
            max_new_tokens=self.window.size,
            temperature=settings.temperature,
            repetition_run=settings.repetition_run,
            record_routing=settings.replay_routing,
        )

    def grade(
        self, problems: list[Problem], responses: list[Response], *, before: Graded | None = None
    ) -> Graded:
        """A verifier that raises costs its response, which goes to `unscored.jsonl`, and nothing else. Where
        a reward stops the run, the responses graded `before` in the batch go there too."""
        texts = [self.decode(response) for response in responses]
        reward, unscored = self.settings.format_reward, self.folder / "unscored.jsonl"
        try:
            return grade(problems, responses, texts, format_reward=reward, unscored=unscored)
        except ValueError:
            if before is not None:
                keep(before, [self.decode(response) for response in before.responses], unscored)
            raise

    def encode(self, problems: list[Problem]) -> list[list[int]]:
        return [self.tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems]

    def decode(self, response: Response) -> str:
        """The text without the end token; other special tokens stay, and make an answer wrong."""
        tokens = response.tokens[:-1] if response.finish == "end" else response.tokens
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def log_batch(self, drawn: Graded, trained: Graded, seconds: float) -> None:
        values = batch_metrics(drawn) | {"trained": len(trained.responses), "seconds": seconds}
        if drawn.responses:
            values |= self.window.observe(perplexity=values["perplexity"], length_p99=values["length_p99"])
        self.logs.write("batch", self.done, step=self.step, values=values)

    def log_update(self, update: int, loss: float, norm: float, scored: dict[str, Tensor]) -> None:
        values = {"update": update, "loss": loss, "grad_norm": norm}
        # Before the first step of a batch, training and rollout are the same policy.
        objective = self.settings.at(self.done).objective
        values |= step_metrics(scored, objective, on_policy=update == 0)
        self.logs.write("update", self.done, step=self.step, values=values)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def save(self) -> Path:
        window = {"stage": self.window.stage, "perplexities": self.window.perplexities}
        return save_checkpoint(
            self.checkpoints,
            self.done,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            state={"done": self.done, "step": self.step, "window": window},
        )

    def resume(self) -> None:
        """Go on from the folder's last checkpoint, if it has one.

        Raises:
            ValueError: the folder holds a run with other settings (more batches, or another pace of saving,
                is fine).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        free = ("batches", "save_every", "tensorboard", "output")
        wanted = json.loads(json.dumps({k: v for k, v in asdict(self.settings).items() if k not in free}))
        record = self.folder / "settings.json"
        if record.exists() and (was := json.loads(record.read_text())) != wanted:
            changed = sorted(name for name in wanted if was.get(name) != wanted[name])
            raise ValueError(
                f"{self.folder} holds a run with another {' and '.join(changed)}; choose another output"
            )
        replace_text(record, json.dumps(wanted, indent=1))
        if place := newest_checkpoint(self.checkpoints):
            state = load_checkpoint(place, model=self.model, optimizer=self.optimizer)
            self.done, self.step = state["done"], state["step"]
            self.window = replace(self.window, **state["window"])
