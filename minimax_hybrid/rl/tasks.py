"""Small tasks whose answers a program can check: each has a generator, a verifier and a difficulty.

They follow the report's section 4.1 (SynLogic: generators with rule verifiers and difficulty parameters).
Training data of your own are `Problem`s too: a prompt and a function that grades a response.
"""

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Rows, columns and quarters of a 4 x 4 sudoku, as places in its 16 cells.
UNITS = [
    *([4 * i + j for j in range(4)] for i in range(4)),
    *([4 * j + i for j in range(4)] for i in range(4)),
    *([8 * i + 2 * j + k for k in (0, 1, 4, 5)] for i in range(2) for j in range(2)),
]


@dataclass(frozen=True)
class Problem:
    """A prompt and how to grade a response to it.

    Args:
        prompt: text before the response.
        verify: response -> grade, True or False or a number from 0 to 1. Sees well-formed responses only.
        form: regular expression that the whole of a well-formed response matches.
        answer: one right response, if there is one to show.
    """

    prompt: str
    verify: Callable[[str], float]
    form: str = r"(?s).*"
    answer: str | None = None

    def well_formed(self, response: str) -> bool:
        return re.fullmatch(self.form, response) is not None

    def reward(self, response: str, *, format_reward: float = 0.0) -> float:
        """format_reward for the form alone, 1 for a right response, in proportion between."""
        if not self.well_formed(response):
            return 0.0
        return format_reward + (1.0 - format_reward) * float(self.verify(response))


def addition(rng: random.Random, digits: int) -> Problem:
    """`12+34=` -> `46`. The difficulty is the number of digits that a summand may have.

    Digits in brackets before the answer, `[64]46`, are the model's own working and are not graded.
    """
    _check_difficulty("digits", digits, 1, 1000)
    a, b = rng.randrange(10**digits), rng.randrange(10**digits)
    answer = str(a + b)
    return Problem(f"{a}+{b}=", lambda response: response.split("]")[-1] == answer, r"(\[\d*\])?\d+", answer)


def cipher(rng: random.Random, length: int) -> Problem:
    """`key c: jgnnq=` -> `hello`: every letter was moved on by its key letter, a = 0.

    The difficulty is the number of letters; the key has one letter per four of them, used in turn.
    """
    _check_difficulty("length", length, 1, 1000)
    plain = "".join(rng.choices(LETTERS, k=length))
    key = "".join(rng.choices(LETTERS, k=(length + 3) // 4))
    text = "".join(_moved(letter, key[i % len(key)]) for i, letter in enumerate(plain))
    return Problem(f"key {key}: {text}=", lambda response: response == plain, r"[a-z]+", plain)


def sudoku(rng: random.Random, blanks: int) -> Problem:
    """`1.34/34.2/2143/4321=` -> the grid filled in: 1 to 4 once in each row, column and quarter.

    The difficulty is the number of blanks. The verifier checks the rules and the clues, not one stored
    solution: with many blanks there are several.
    """
    _check_difficulty("blanks", blanks, 1, 16)
    grid = _solved_grid(rng)
    hidden = set(rng.sample(range(16), blanks))
    clues = ["." if i in hidden else grid[i] for i in range(16)]
    return Problem(
        f"{_grid_text(clues)}=", lambda r: _solves(r, clues), r"[1-4]{4}(/[1-4]{4}){3}", _grid_text(grid)
    )


TASKS: dict[str, Callable[[random.Random, int], Problem]] = {
    "addition": addition,
    "cipher": cipher,
    "sudoku": sudoku,
}


def held_out(problem: Problem) -> bool:
    """True for one prompt in ten, the same ones everywhere: training leaves them for measuring."""
    return zlib.crc32(problem.prompt.encode()) % 10 == 0


def draw(
    task: Callable[[random.Random, int], Problem],
    rng: random.Random,
    *,
    difficulty: int,
    count: int,
    held_out_only: bool = False,
) -> list[Problem]:
    """`count` problems of one side of the split: for training, or with held_out_only for measuring."""
    problems: list[Problem] = []
    for _ in range(1000 * count + 1000):
        if len(problems) == count:
            return problems
        problem = task(rng, difficulty)
        if held_out(problem) == held_out_only:
            problems.append(problem)
    raise ValueError(
        f"difficulty {difficulty} has too few problems: found {len(problems)} of {count} with "
        f"held_out_only={held_out_only}"
    )


def _check_difficulty(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")


def _moved(letter: str, key: str) -> str:
    return LETTERS[(LETTERS.index(letter) + LETTERS.index(key)) % 26]


def _grid_text(cells: list[str]) -> str:
    return "/".join("".join(cells[4 * row : 4 * row + 4]) for row in range(4))


def _solved_grid(rng: random.Random) -> list[str]:
    """One of the 288 grids: cells in order, each the first of its shuffled digits that lets the rest be
    filled."""

    def fill(cells: list[str]) -> list[str] | None:
        if len(cells) == 16:
            return cells
        taken = {cells[i] for unit in UNITS if len(cells) in unit for i in unit if i < len(cells)}
        for digit in rng.sample("1234", 4):
            full = None if digit in taken else fill([*cells, digit])
            if full:
                return full
        return None

    grid = fill([])
    assert grid is not None
    return grid


def _solves(response: str, clues: list[str]) -> bool:
    cells = response.replace("/", "")
    kept = all(clue in (".", cell) for clue, cell in zip(clues, cells, strict=True))
    return kept and all(len({cells[i] for i in unit}) == 4 for unit in UNITS)
