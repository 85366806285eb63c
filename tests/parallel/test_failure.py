"""A rank that raises ends the run: its error is shown and nobody waits for it."""

import time

import pytest
import torch
from ranks import run_on_ranks
from test_fsdp import by_plain_loop, load, tokens
from torch import distributed as dist

pytestmark = pytest.mark.slow
STARTED = "rank 0 enters its pass"


def raises_before_its_pass() -> None:
    model = by_plain_loop(load())
    mine = tokens()[1][dist.get_rank()]
    model.log_probs(mine)
    dist.barrier()
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 has no data left")
    print(STARTED, flush=True)
    model.log_probs(mine).mean().backward()  # gathers from rank 1


def waits_for_ever() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    time.sleep(600)


def test_the_error_of_a_rank_ends_all_within_a_minute() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(raises_before_its_pass, seconds=110)
    assert time.monotonic() - started < 60  # most of it imports and loading
    assert "rank 1 has no data left" in str(caught.value)
    assert STARTED in str(caught.value)


def test_ranks_that_wait_for_each_other_are_ended_by_the_time_limit() -> None:
    with pytest.raises(AssertionError, match="2 ranks took more than 25 seconds"):
        run_on_ranks(waits_for_ever, seconds=25)
