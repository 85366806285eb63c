"""A block memory that grows: in any pieces, padded or packed, it has the bits of one call over everything."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minimax_kernels import (
    BLOCK,
    BlockMemory,
    current_state,
    extend,
    extend_packed,
    fold,
    lightning_attention,
)

LOG_DECAY = torch.tensor([-0.9, -0.01])


def inputs(B: int, T: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, 2, 8, generator=make) for _ in range(3))
    return q, k, v


@given(
    lengths=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=4),
    max_rollback=st.sampled_from([1, 40, 1024]),
)
def test_packed_documents_are_one_packed_call_and_leave_the_last_one_s_memory(
    lengths: list[int], max_rollback: int
) -> None:
    q, k, v = inputs(1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    last = (torch.arange(sum(lengths)) >= bounds[-2])[None]
    out, memory = extend_packed(
        q, k, v, LOG_DECAY, cu_seqlens=bounds, last_document=last, max_rollback=max_rollback
    )
    whole, states = lightning_attention(q, k, v, LOG_DECAY, cu_seqlens=bounds)
    assert torch.equal(out, whole)
    torch.testing.assert_close(current_state(memory, LOG_DECAY), states[-1:], atol=1e-5, rtol=1e-5)
    assert int(memory.cache_seqlens) >= min(max_rollback, lengths[-1])


def test_packed_documents_of_several_batch_entries_leave_each_its_own_memory() -> None:
    q, k, v = inputs(2, 150)
    bounds = torch.tensor([0, 20, 150, 290, 300], dtype=torch.int32)  # entries of [20, 130] and [140, 10]
    position = torch.arange(150)
    last = torch.stack([position >= 20, position >= 140])
    _, memory = extend_packed(q, k, v, LOG_DECAY, cu_seqlens=bounds, last_document=last, max_rollback=40)
    for b, start in enumerate((20, 140)):
        alone = (x[b : b + 1, start:] for x in (q, k, v))
        state = current_state(memory, LOG_DECAY)[b : b + 1]
        torch.testing.assert_close(state, lightning_attention(*alone, LOG_DECAY)[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_rollback", [1, 100])
def test_folding_changes_where_the_memory_lies_and_not_what_it_is(max_rollback: int) -> None:
    q, k, v = inputs(3, 190)
    mask = torch.arange(190) >= torch.tensor([0, 100, 180])[:, None]
    empty = BlockMemory.empty(k, v)
    _, memory = extend(q, k, v, LOG_DECAY, empty, token_mask=mask, max_rollback=max_rollback)
    folded = fold(memory, LOG_DECAY)
    assert folded.is_one_block() and int(folded.cache_seqlens.max()) < BLOCK
    before, after = (current_state(x, LOG_DECAY) for x in (memory, folded))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_extending_leaves_the_given_memory_as_it_was() -> None:
    q, k, v = inputs(2, 80)
    _, memory = extend(q, k, v, LOG_DECAY, BlockMemory.empty(k, v), token_mask=None, max_rollback=8)
    copy = memory.map(torch.clone)
    extend(q, k, v, LOG_DECAY, memory, token_mask=None, max_rollback=8)
    assert all(torch.equal(a, b) for a, b in zip(memory, copy, strict=True))
