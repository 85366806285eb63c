"""Packing lays the real rows of a padded batch end to end, and finds its way back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimax_kernels import cu_seqlens_from_lengths, pack, unpack
from minimax_kernels.packing import check_cu_seqlens

masks = st.integers(1, 9).flatmap(
    lambda T: st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=1, max_size=4)
)


@given(masks)
def test_unpacking_a_packed_batch_gives_the_real_rows_and_zeros(mask: list[list[bool]]) -> None:
    mask = torch.tensor(mask)
    x = torch.randn(*mask.shape, 3)
    packed, cu_seqlens = pack(x, mask)
    assert packed.shape == (1, int(mask.sum()), 3)
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.diff().tolist() == mask.sum(1).tolist()
    assert torch.equal(unpack(packed, mask), torch.where(mask[..., None], x, 0))


def test_sequence_s_is_the_rows_between_its_two_bounds() -> None:
    x = torch.arange(6.0).reshape(2, 3, 1)
    packed, cu_seqlens = pack(x, torch.tensor([[0, 1, 1], [1, 0, 0]]))
    assert packed.flatten().tolist() == [1, 2, 3]
    assert cu_seqlens.tolist() == [0, 2, 3]


def test_bounds_are_the_running_sum_of_lengths() -> None:
    assert cu_seqlens_from_lengths(torch.tensor([5, 0, 13])).tolist() == [0, 5, 5, 18]


@pytest.mark.parametrize(
    ("bounds", "batch", "complaint"),
    [
        (torch.tensor([0, 3]), 2, "needs B = 1, got B = 2"),
        (torch.tensor([0.0, 3.0]), 1, "int32 or int64"),
        (torch.tensor([[0, 3]]), 1, "vector"),
        (torch.tensor([], dtype=torch.int32), 1, "vector"),
        (torch.tensor([1, 3]), 1, "must start at 0, got 1"),
        (torch.tensor([0, 3, 2]), 1, "never decrease, got 3 before 2"),
        (torch.tensor([0, 9]), 1, "end at T = 8 or before, got 9"),
    ],
)
def test_bounds_that_break_a_rule_are_refused_by_name(
    bounds: torch.Tensor, batch: int, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_cu_seqlens(bounds, batch=batch, positions=8)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="mask must have the batch's shape"):
        pack(torch.zeros(2, 3, 1), torch.ones(3, 2))
