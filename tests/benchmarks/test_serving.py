"""The serving case compares like with like."""

import random
from argparse import Namespace

import pytest

from benchmarks.cases import serving


def test_lengths_are_ragged_and_a_seed_fixes_them() -> None:
    one, two = (serving.long_tail(random.Random(0), 200) for _ in range(2))
    assert one == two
    lengths = sorted(request.sampling.max_new_tokens for request in one)
    assert lengths[0] >= 4 and 30 < lengths[100] < 55 and lengths[-1] > 6 * lengths[100]


@pytest.mark.slow
def test_every_side_gives_its_time_and_the_table_says_so() -> None:
    rows = list(serving.run(Namespace(quick=True, words="")))
    tasks = {row.task for row in rows}
    assert {"long tail", "addition", "groups of 8", "groups of 16", "step", "resident memory"} <= tasks
    for task in ("long tail", "addition"):
        of = [row for row in rows if row.task == task]
        assert {row.side for row in of} == {"engine", "static", "transformers"}
        assert len({row.length for row in of}) == 1
    assert "engine / static" in serving.table(rows)
