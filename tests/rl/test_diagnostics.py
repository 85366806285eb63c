"""What the agreement of two records of log-probabilities says, and that the mask decides what counts."""

import math

import pytest
import torch

from minimax_hybrid.rl.diagnostics import agreement


def test_equal_records_agree_fully() -> None:
    x = torch.tensor([[-1.0, -2.0, math.nan]])
    mask = torch.tensor([[1, 1, 0]])
    assert agreement(x, x, mask) == {
        "correlation": pytest.approx(1.0),
        "probability_mean": 0.0,
        "probability_max": 0.0,
        "log_ratio_max": 0.0,
    }


def test_the_correlation_is_pearsons_of_probabilities() -> None:
    make = torch.Generator().manual_seed(0)
    p = 0.1 + 0.8 * torch.rand(1, 500, generator=make, dtype=torch.float64)
    q = (p + 0.05 * torch.randn(1, 500, generator=make, dtype=torch.float64)).clamp(0.01, 0.99)
    found = agreement(p.log(), q.log(), torch.ones(1, 500))
    assert found["correlation"] == pytest.approx(torch.corrcoef(torch.cat([p, q]))[0, 1].item())
    assert found["probability_max"] == pytest.approx((p - q).abs().max().item())
    assert found["log_ratio_max"] == pytest.approx((p.log() - q.log()).abs().max().item())


def test_records_without_spread_or_tokens_have_a_defined_result() -> None:
    flat = torch.full((1, 3), -1.0)
    assert agreement(flat, flat, torch.ones(1, 3))["correlation"] == 1.0
    assert agreement(flat, flat - 1, torch.ones(1, 3))["correlation"] == 0.0
    assert agreement(flat, flat, torch.zeros(1, 3))["correlation"] == 1.0
