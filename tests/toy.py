"""The smallest thing a trainer can train on: six letters, and a reward for saying "a"."""

import dataclasses
import random
from pathlib import Path

from minimax_hybrid.rl.objective import CISPO
from minimax_hybrid.rl.settings import TrainSettings
from minimax_hybrid.rl.tasks import Problem


def say_a(rng: random.Random, difficulty: int) -> Problem:
    """Any prompt of letters; the reward is the share of the response that is "a"."""
    prompt = "".join(rng.choices("bcdef", k=difficulty))
    return Problem(prompt, lambda text: text.replace(" ", "").count("a") / max(1, len(text.replace(" ", ""))))


def settings(folder: Path, **changes: object) -> TrainSettings:
    plain = TrainSettings(
        model="unused",
        output=str(folder),
        task="toy:say_a",
        difficulty=4,
        objective=CISPO(ratio_max=5.0),
        learning_rate=3e-3,
        batches=4,
        windows=(6,),
        prompts=4,
        responses=4,
        updates=4,
        evaluate_every=100,
        evaluation_problems=4,
        save_every=1,
    )
    return dataclasses.replace(plain, **changes)
