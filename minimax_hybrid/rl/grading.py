"""From responses to rewards, when the program that grades them is somebody else's and may fail."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .batches import Response
from .tasks import Problem


@dataclass(frozen=True)
class Graded:
    """Responses that have a reward, and their groups."""

    responses: list[Response]
    rewards: Tensor  # (B,)
    group_ids: Tensor  # (B,)
    failures: int = 0

    def only(self, keep: Tensor) -> "Graded":
        """Those where `keep` (B,) is true."""
        responses = [response for response, kept in zip(self.responses, keep.tolist(), strict=True) if kept]
        return Graded(responses, self.rewards[keep], self.group_ids[keep], self.failures)

    def __add__(self, other: "Graded") -> "Graded":
        """Both, with the groups of the second after those of the first."""
        first = int(self.group_ids.max()) + 1 if len(self.group_ids) else 0
        return Graded(
            self.responses + other.responses,
            torch.cat([self.rewards, other.rewards]),
            torch.cat([self.group_ids, first + other.group_ids]),
            self.failures + other.failures,
        )


def grade(
    problems: list[Problem],
    responses: list[Response],
    texts: list[str],
    *,
    format_reward: float,
    unscored: Path,
) -> Graded:
    """Ask each response's problem for its reward.

    A response whose verifier raised is left out of the result and appended, with the error, to the file
    `unscored`; so is the whole batch where a reward is not finite. No finished rollout is lost.

    Raises:
        ValueError: rewards that are not finite, by row.
    """
    rewards: list[float] = []
    errors: list[str | None] = []
    for response, text in zip(responses, texts, strict=True):
        try:
            rewards.append(float(problems[response.group].reward(text, format_reward=format_reward)))
            errors.append(None)
        except (Exception, SystemExit) as error:  # a verifier may raise anything
            rewards.append(0.0)
            errors.append(f"{type(error).__name__}: {error}")
    not_finite = [i for i, reward in enumerate(rewards) if not math.isfinite(reward)]
    for i in not_finite:
        errors[i] = f"reward {rewards[i]}"
    lost = range(len(responses)) if not_finite else [i for i, error in enumerate(errors) if error]
    _append(unscored, [_record(problems, responses[i], texts[i], errors[i]) for i in lost])
    if not_finite:
        raise ValueError(
            f"rewards of rows {not_finite[:20]} are not finite (the first is {rewards[not_finite[0]]}); "
            f"the batch is in {unscored}"
        )
    kept = [i for i, error in enumerate(errors) if error is None]
    return Graded(
        [responses[i] for i in kept],
        torch.tensor([rewards[i] for i in kept]),
        torch.tensor([responses[i].group for i in kept], dtype=torch.long),
        len(errors) - len(kept),
    )


def keep(graded: Graded, texts: list[str], path: Path) -> None:
    """Append responses with their rewards to a file of records."""
    rows = zip(graded.responses, texts, graded.rewards.tolist(), strict=True)
    _append(path, [{"text": text, "reward": reward, **_fields(r)} for r, text, reward in rows])


def _record(problems: list[Problem], response: Response, text: str, error: str | None) -> dict[str, object]:
    problem = problems[response.group].prompt
    return {"problem": problem, "text": text, "error": error, **_fields(response)}


def _fields(response: Response) -> dict[str, object]:
    fields = asdict(response)
    fields.pop("routing")
    return fields


def _append(path: Path, records: list[dict[str, object]]) -> None:
    if not records:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
