"""From responses to rewards, where the program that grades them is the user's and may fail."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batches import Response
from .tasks import Problem


@dataclass(frozen=True)
class Graded:
    """Responses that have a reward, and their groups."""

    responses: list[Response]
    texts: list[str]
    rewards: Tensor  # (B,)
    group_ids: Tensor  # (B,)
    failures: int = 0

    @staticmethod
    def nothing() -> "Graded":
        return Graded([], [], torch.zeros(0), torch.zeros(0, dtype=torch.long))

    def select(self, chosen: Tensor) -> "Graded":
        """Those where `chosen` (B,) is true."""
        at = chosen.nonzero().flatten().tolist()
        return Graded(
            [self.responses[i] for i in at],
            [self.texts[i] for i in at],
            self.rewards[chosen],
            self.group_ids[chosen],
            self.failures,
        )

    def __add__(self, other: "Graded") -> "Graded":
        """Both, with the groups of the second after those of the first."""
        first = int(self.group_ids.max()) + 1 if len(self.group_ids) else 0
        return Graded(
            self.responses + other.responses,
            self.texts + other.texts,
            torch.cat([self.rewards, other.rewards]),
            torch.cat([self.group_ids, first + other.group_ids]),
            self.failures + other.failures,
        )


def response_text(tokenizer: Any, response: Response) -> str:
    """The text without the end token; other special tokens stay, and make an answer wrong."""
    tokens = response.tokens[:-1] if response.finish_reason == "end" else response.tokens
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


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
        ValueError: rewards that are not finite, with the numbers of their responses.
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
    lost = list(range(len(responses))) if not_finite else [i for i, error in enumerate(errors) if error]
    _append(unscored, [_record(responses[i], texts[i], problems, errors[i]) for i in lost])
    if not_finite:
        raise ValueError(
            f"rewards of responses {not_finite[:20]} are not finite (the first is {rewards[not_finite[0]]}); "
            f"the batch is in {unscored}"
        )
    kept = [i for i, error in enumerate(errors) if error is None]
    return Graded(
        [responses[i] for i in kept],
        [texts[i] for i in kept],
        torch.tensor([rewards[i] for i in kept]),
        torch.tensor([responses[i].group for i in kept], dtype=torch.long),
        len(errors) - len(kept),
    )


def append_unscored(graded: Graded, path: Path) -> None:
    """Append responses that will not be trained on, with the rewards they had, to `unscored.jsonl`."""
    entries = zip(graded.responses, graded.texts, graded.rewards.tolist(), strict=True)
    _append(path, [{"text": text, "reward": reward, **_fields(r)} for r, text, reward in entries])


def _record(response: Response, text: str, problems: list[Problem], error: str | None) -> dict[str, object]:
    problem = problems[response.group].prompt
    return {"problem": problem, "text": text, "error": error, **_fields(response)}


def _fields(response: Response) -> dict[str, object]:
    return {
        "prompt": response.prompt,
        "tokens": response.tokens.tolist(),
        "log_probs": response.log_probs.tolist(),
        "finish": response.finish_reason,
        "temperature": response.temperature,
        "group": response.group,
        "filtered": response.filtered,
    }


def _append(path: Path, records: list[dict[str, object]]) -> None:
    if not records:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
