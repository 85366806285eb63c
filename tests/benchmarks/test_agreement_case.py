"""Decoding and the training forward agree: where bits differ, and how probabilities correlate."""

import pytest
import torch

from benchmarks.cases import agreement


def tokens(B: int, T: int) -> torch.Tensor:
    return torch.randint(1, 96, (B, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_and_forward_differ_only_by_the_rounding_of_single_products(dtype: torch.dtype) -> None:
    """A position computed alone has the forward's bits in the operator and in every norm. Matrix products,
    in layers, experts and head, may order their sums differently for one position: rounding, nothing else."""
    found = agreement.differing_bits(agreement.random_model(64, layers=4).to(dtype), tokens(1, 130))
    for stage in (agreement.OPERATOR, "norms"):
        assert found.pop(stage) == (0, 0), stage
    assert set(found) == {agreement.PRODUCTS, agreement.SOFTMAX, "experts"}
    for stage, (_, size) in found.items():
        assert size < 8 * torch.finfo(dtype).eps, stage


@pytest.mark.parametrize("width", [64, 256])
def test_probabilities_of_decoding_and_training_correlate_in_bfloat16(width: int) -> None:
    net = agreement.random_model(width, layers=8 if width == 64 else 4).to(torch.bfloat16)
    new, recorded = agreement.decode(net, tokens(4, 8), 70)
    for layout, scored in agreement.score(net, torch.cat([tokens(4, 8), new], dim=1), 70).items():
        found = agreement.agreement(scored, recorded, torch.ones_like(recorded))
        assert found["correlation"] > 0.999, layout
        assert 0.05 < recorded.exp().std(), "probabilities that are all alike show nothing"
