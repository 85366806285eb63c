"""Claims about the shipped tasks: what they generate is right, and what is wrong earns nothing."""

import random

import pytest

from minimax_hybrid.rl.tasks import TASKS, Problem, addition, cipher, draw, held_out, sudoku

DIALS = {"addition": (1, 3, 8), "cipher": (1, 5, 12), "sudoku": (1, 6, 16)}
CASES = [(name, level) for name, levels in DIALS.items() for level in levels]


@pytest.mark.parametrize(("name", "level"), CASES)
def test_the_answer_earns_one_and_a_damaged_one_less(name: str, level: int) -> None:
    rng = random.Random(level)
    for _ in range(50):
        problem = TASKS[name](rng, level)
        assert problem.reward(problem.answer) == 1.0
        assert problem.reward(problem.answer, format_reward=0.1) == 1.0
        for damaged in (problem.answer + problem.answer[-1], problem.answer + " ", "", "?"):
            assert problem.reward(damaged) == 0.0


def test_the_form_alone_earns_the_format_reward() -> None:
    problem = addition(random.Random(0), 2)
    wrong = str(int(problem.answer) + 1)
    assert problem.reward(wrong, format_reward=0.1) == pytest.approx(0.1)
    assert problem.reward("x" + problem.answer, format_reward=0.1) == 0.0
    half = Problem("p", lambda response: 0.5)
    assert half.reward("anything\nat all", format_reward=0.2) == pytest.approx(0.6)


def test_working_in_brackets_before_a_sum_is_not_graded() -> None:
    problem = addition(random.Random(0), 2)
    for working in ("[]", "[99]", f"[{problem.answer[::-1]}]"):
        assert problem.reward(working + problem.answer) == 1.0
        assert problem.reward(working + problem.answer + "0") == 0.0
    for malformed in (f"[{problem.answer}", f"[{problem.answer}]", f"[1][2]{problem.answer}"):
        assert problem.reward(malformed, format_reward=0.1) == 0.0


def test_addition_adds() -> None:
    for seed in range(20):
        problem = addition(random.Random(seed), 4)
        a, b = problem.prompt.removesuffix("=").split("+")
        assert int(problem.answer) == int(a) + int(b)
        assert max(len(a), len(b)) <= 4


def test_the_cipher_is_undone_by_moving_letters_back() -> None:
    for length in (1, 4, 5, 9):
        problem = cipher(random.Random(length), length)
        key, text = problem.prompt.removeprefix("key ").removesuffix("=").split(": ")
        assert len(text) == length
        assert len(key) == -(-length // 4)
        back = [chr((ord(c) - ord(key[i % len(key)])) % 26 + ord("a")) for i, c in enumerate(text)]
        assert "".join(back) == problem.answer


def test_sudoku_hides_as_many_cells_as_its_dial_says_and_takes_any_solution() -> None:
    for blanks in range(1, 17):
        assert sudoku(random.Random(blanks), blanks).prompt.count(".") == blanks
    empty = sudoku(random.Random(1), 16)
    assert empty.reward("1234/3412/2143/4321") == 1.0
    assert empty.reward("2143/4321/1234/3412") == 1.0


def test_sudoku_checks_rows_columns_quarters_and_clues() -> None:
    empty = sudoku(random.Random(1), 16)
    assert empty.reward("1234/2341/3412/4123") == 0.0  # quarters
    assert empty.reward("1234/1234/3412/3412") == 0.0  # columns
    assert empty.reward("1122/3344/1122/3344") == 0.0  # rows
    other = sudoku(random.Random(2), 1)
    renamed = other.answer.translate(str.maketrans("1234", "2341"))
    assert empty.reward(renamed) == 1.0
    assert other.reward(renamed) == 0.0  # clues


def test_every_solved_grid_can_come_up() -> None:
    grids = {sudoku(random.Random(seed), 1).answer for seed in range(4000)}
    assert len(grids) == 288


@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_gives_the_same_problems(name: str) -> None:
    one, two = (draw(TASKS[name], random.Random(5), difficulty=3, count=8) for _ in range(2))
    assert [p.prompt for p in one] == [p.prompt for p in two]


def test_training_never_draws_a_held_out_problem() -> None:
    train = draw(addition, random.Random(0), difficulty=2, count=300)
    test = draw(addition, random.Random(0), difficulty=2, count=300, held_out_only=True)
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert all(held_out(p) for p in test)
    share = sum(held_out(addition(random.Random(seed), 5)) for seed in range(4000)) / 4000
    assert 0.08 < share < 0.12


def test_a_dial_out_of_range_and_a_dry_source_are_refused() -> None:
    with pytest.raises(ValueError, match="blanks must lie in \\[1, 16\\], got 17"):
        sudoku(random.Random(0), 17)
    with pytest.raises(ValueError, match="digits must lie"):
        addition(random.Random(0), 0)
    with pytest.raises(ValueError, match="too few problems"):
        draw(
            lambda rng, level: Problem("one", lambda r: 1.0),
            random.Random(0),
            difficulty=1,
            count=2,
            held_out_only=not held_out(Problem("one", lambda r: 1.0)),
        )
