"""The settings of a training run, the TOML file that holds them, and the schedule of the output window."""

import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from .objective import OBJECTIVES, Objective


@dataclass(frozen=True)
class Later:
    """What changes from a batch on; what is None stays.

    The report's section 5 has a lower threshold of gradient clipping and a lower eps_high at later stages,
    and gives neither values nor times.
    """

    batch: int
    learning_rate: float | None = None
    max_grad_norm: float | None = None
    objective: Objective | None = None


@dataclass(frozen=True)
class TrainSettings:
    """One run. A setting without a default is not given in the report, or is yours to choose.

    Args:
        model: a folder with weights and tokenizer, or "demo", the checkpoint that comes with this package.
        output: the run's folder: logs, checkpoints.
        task, difficulty: a shipped task (addition, cipher, sudoku), or "module:function", and its parameter.
        batches: rollout batches; a finished run that is given more continues.
        prompts, responses: per batch, and responses to each (G).
        updates: optimiser steps per batch, each on another part of it (report: 16).
        micro_batch: responses per forward pass; changes memory, not the result.
        windows: output windows in tokens; with several, the staged schedule of section 5.
        dynamic_sampling: how often more prompts may be drawn to replace groups without spread; None trains on
            all.
        overlong_ramp: tokens before the window over which the length penalty grows; 0 for none.
        reward_range: (low, high) to clip rewards to.
        format_reward: what a well-formed wrong response earns.
        replay_routing: train through the experts that the rollout chose.
        repetition_run: end a response after so many confident tokens in a row (report: 3,000).
        evaluate_every, evaluation_problems: greedy accuracy on held-out problems, every so many batches.
        save_every: batches between checkpoints.
        later: changes of learning rate, clipping or objective, by batch.
    """

    model: str
    output: str
    task: str
    difficulty: int
    objective: Objective
    learning_rate: float
    batches: int
    windows: tuple[int, ...]
    prompts: int = 32
    responses: int = 8
    updates: int = 16
    micro_batch: int = 256
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    dynamic_sampling: int | None = None
    overlong_ramp: int = 0
    reward_range: tuple[float, float] | None = None
    format_reward: float = 0.0
    replay_routing: bool = False
    repetition_run: int | None = None
    evaluate_every: int = 5
    evaluation_problems: int = 200
    save_every: int = 5
    tensorboard: bool = False
    device: str = "cpu"
    seed: int = 0
    later: tuple[Later, ...] = ()

    def at(self, batch: int) -> "TrainSettings":
        """These settings with what has changed up to and including that batch."""
        now = self
        for change in self.later:
            if change.batch <= batch:
                named = {k: v for k, v in vars(change).items() if k != "batch" and v is not None}
                now = replace(now, later=(), **named)
        return now

    @property
    def wants_reference(self) -> bool:
        """Whether some objective of the run has a KL term, which needs the policy that the run began with."""
        objectives = [self.objective, *(change.objective for change in self.later if change.objective)]
        return any(objective.kl_coefficient > 0 for objective in objectives)

    def __post_init__(self) -> None:
        for name in (
            "batches",
            "prompts",
            "responses",
            "updates",
            "micro_batch",
            "evaluate_every",
            "evaluation_problems",
            "save_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0 or not self.max_grad_norm > 0:
            raise ValueError(
                "learning_rate and max_grad_norm must be above 0, "
                f"got {self.learning_rate} and {self.max_grad_norm}"
            )
        if self.updates > self.prompts * self.responses:
            raise ValueError(
                f"updates is {self.updates}, more than the {self.prompts * self.responses} responses"
            )
        if self.dynamic_sampling is not None and self.dynamic_sampling < 0:
            raise ValueError(f"dynamic_sampling must be at least 0, or left out, got {self.dynamic_sampling}")
        batches = [change.batch for change in self.later]
        if batches != sorted(set(batches)) or min(batches, default=1) < 1:
            raise ValueError(f"the batches of later changes must grow from at least 1, got {batches}")
        for batch in batches:
            self.at(batch)  # settings after a change are checked like the first


Kind = TypeVar("Kind", Later, TrainSettings)


def read_settings(path: Path | str) -> TrainSettings:
    """Settings from a TOML file; the objective is a table with its name and bounds.

        [objective]
        name = "cispo"
        ratio_max = 5.0

        [[later]]               # as many as there are changes
        batch = 100
        learning_rate = 1e-5
        max_grad_norm = 0.5
        objective = { name = "cispo", ratio_max = 3.0 }

    Raises:
        ValueError: unknown, missing or impossible settings, with their names.
    """
    table = tomllib.loads(Path(path).read_text())
    try:
        for name in ("windows", "reward_range", "later"):
            if name in table:
                table[name] = tuple(_listed(name, table[name]))
        if "later" in table:
            table["later"] = tuple(_build(Later, change, "later: ") for change in table["later"])
        return _build(TrainSettings, table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        written = "[[later]] tables" if name == "later" else "a list in brackets"
        raise ValueError(f"{name} is {value!r}; write it as {written}")
    return value


def _build(kind: type[Kind], table: dict[str, Any], where: str = "") -> Kind:
    known = {f.name for f in fields(kind)}
    if unknown := sorted(set(table) - known):
        raise ValueError(f"{where}unknown settings {unknown}; known are {sorted(known)}")
    if "objective" in table:
        table = table | {"objective": read_objective(table["objective"])}
    try:
        return kind(**table)
    except TypeError as error:
        raise ValueError(f"{where}{error}") from None


def read_objective(table: dict[str, Any]) -> Objective:
    """`{"name": "cispo", "ratio_max": 5.0}` and its like."""
    if not isinstance(table, dict):
        raise ValueError(f"objective is {table!r}; write a table with its name and bounds")
    bounds = dict(table)
    name = bounds.pop("name", None)
    if name not in OBJECTIVES:
        raise ValueError(f"objective.name is {name!r}; choose one of {sorted(OBJECTIVES)}")
    try:
        return OBJECTIVES[name](**bounds)
    except TypeError as error:
        raise ValueError(f"objective {name!r}: {error}") from None


@dataclass
class StagedWindow:
    """The staged output window of the report's section 5: 40K, 48K, 56K, 64K, 72K, 80K, one after the other.

    The report's indicators for the next stage include that the perplexity of the generations has converged
    and that the 99th percentile of their lengths approaches the window. It gives no thresholds, nor says
    whether one indicator is enough; here both must hold, and the defaults are ours.

    Args:
        sizes: windows in tokens, growing.
        patience: batches over which perplexity is compared.
        perplexity_change: converged when it moved by less than this, relatively, over the last `patience`
            batches.
        near: the 99th percentile of lengths approaches the window from this share of it on.
    """

    sizes: tuple[int, ...]
    patience: int = 5
    perplexity_change: float = 0.05
    near: float = 0.9
    stage: int = 0
    perplexities: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"windows must be positive and grow, got {list(self.sizes)}")

    @property
    def size(self) -> int:
        return self.sizes[self.stage]

    def observe(self, *, perplexity: float, length_p99: float) -> dict[str, float]:
        """Record one batch, move to the next stage if both indicators say so, and return what to log."""
        self.perplexities = [*self.perplexities[-self.patience :], perplexity]
        span = max(self.perplexities) - min(self.perplexities)
        converged = len(self.perplexities) > self.patience and span <= self.perplexity_change * perplexity
        near = length_p99 >= self.near * self.size
        report = {"window": self.size, "window_converged": float(converged), "window_near": float(near)}
        if converged and near and self.stage + 1 < len(self.sizes):
            self.stage, self.perplexities = self.stage + 1, []
        return report
