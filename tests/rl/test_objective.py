"""Claims about single tokens, normalisers, masks and bad input of `policy_loss`; laws are in
test_objective_laws."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from minimax_hybrid.rl.objective import CISPO, DAPO, GRPO, REINFORCE, Objective, policy_loss, policy_metrics

METRICS = {
    "tokens",
    "clipped_positive",
    "clipped_negative",
    "dropped",
    "dropped_tokens",
    "ratio_mean",
    "ratio_smallest",
    "ratio_p01",
    "ratio_p50",
    "ratio_p99",
    "ratio_largest",
    "approx_kl",
}


def loss_and_metrics(
    *tokens: Any, ref_log_probs: Tensor | None = None, entropy: Tensor | None = None, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    loss = policy_loss(*tokens, ref_log_probs=ref_log_probs, **options)
    return loss, policy_metrics(*tokens, ref_log_probs=ref_log_probs, entropy=entropy)


def one_token(ratio: float, advantage: float, objective: Objective) -> tuple[float, float, dict[str, float]]:
    """Loss, its derivative by log pi, and the metrics of a single token."""
    log_probs = torch.tensor([[-1.5]], requires_grad=True)
    old = log_probs.detach() - math.log(ratio)
    loss, metrics = loss_and_metrics(log_probs, old, torch.tensor([advantage]), torch.ones(1, 1), objective)
    loss.backward()
    return loss.item(), log_probs.grad.item(), metrics


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("ratio", "weight"), [(10.0, 5.0), (0.01, 0.01), (1.0, 1.0)])
def test_cispo_weighs_by_the_clipped_ratio_and_never_drops(
    ratio: float, weight: float, advantage: float
) -> None:
    loss, gradient, metrics = one_token(ratio, advantage, CISPO(ratio_max=5.0))
    assert loss == pytest.approx(-weight * advantage * -1.5, rel=1e-5)
    assert gradient == pytest.approx(-weight * advantage, rel=1e-5)
    assert metrics["dropped_tokens"] == 0


@pytest.mark.parametrize(
    ("objective", "low", "high"), [(DAPO(), 0.8, 1.28), (GRPO(), 0.8, 1.2)], ids=["dapo", "grpo"]
)
def test_the_trust_region_drops_only_where_the_step_would_leave_it(
    objective: Objective, low: float, high: float
) -> None:
    inside, outside = 1e-3, -1e-3
    for edge, side in ((high, 1.0), (low, -1.0)):
        kept = edge - side * inside
        gone = edge - side * outside
        assert one_token(kept, side, objective)[1] == pytest.approx(-kept * side, rel=1e-5)
        assert one_token(gone, side, objective)[1] == 0.0
        assert one_token(gone, -side, objective)[1] == pytest.approx(gone * side, rel=1e-5)


def test_cispo_has_no_silent_bound() -> None:
    with pytest.raises(TypeError, match="ratio_max"):
        CISPO()


def test_an_epsilon_given_as_a_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="1 \\+ epsilon is the maximum"):
        CISPO(ratio_max=0.28)
    with pytest.raises(ValueError, match="ratio itself"):
        DAPO(trust_min=-0.2)


def losses(objective: Objective, **options: object) -> float:
    """Two responses of 1 and 3 tokens whose tokens' losses are 1 and 3."""
    log_probs = torch.tensor([[-1.0, -9.0, -9.0], [-3.0, -3.0, -3.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    return policy_loss(log_probs, log_probs, torch.ones(2), mask, objective, **options).item()


def test_each_mean_is_the_one_it_is_named_for() -> None:
    assert losses(CISPO(ratio_max=5.0)) == pytest.approx(2.5)
    assert losses(DAPO()) == pytest.approx(2.5)
    assert losses(REINFORCE()) == pytest.approx(2.5)
    assert losses(GRPO()) == pytest.approx(2.0)
    assert losses(CISPO(ratio_max=5.0, sample_share=1.0)) == pytest.approx(2.0)
    assert losses(CISPO(ratio_max=5.0, sample_share=0.25)) == pytest.approx(0.25 * 2.0 + 0.75 * 2.5)
    assert losses(CISPO(ratio_max=5.0), group_ids=torch.tensor([7, -2])) == pytest.approx((1 + 3) / 2)
    assert losses(CISPO(ratio_max=5.0), group_ids=torch.tensor([3, 3])) == pytest.approx(2.5)
    assert losses(CISPO(ratio_max=5.0), normaliser=20) == pytest.approx(0.5)
    assert losses(GRPO(), normaliser=8) == pytest.approx((1 + 3) / 8)
    mixed = CISPO(ratio_max=5.0, sample_share=0.25)
    assert losses(mixed, normaliser=(20.0, 8.0)) == pytest.approx(0.25 * 0.5 + 0.75 * 0.5)


@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf])
def test_what_the_mask_hides_leaks_nowhere(hidden: float) -> None:
    log_probs = torch.tensor([[-1.0, hidden], [hidden, hidden], [-2.0, -0.5]], requires_grad=True)
    old = torch.tensor([[-1.1, hidden], [hidden, hidden], [-2.0, -0.4]])
    advantages = torch.tensor([[1.0, hidden], [hidden, hidden], [-1.0, 1.0]])
    mask = torch.tensor([[1, 0], [0, 0], [1, 1]])
    for objective in (CISPO(ratio_max=2.0), DAPO(), GRPO(kl_coefficient=0.1), REINFORCE()):
        log_probs.grad = None
        loss, metrics = loss_and_metrics(
            log_probs, old, advantages, mask, objective, ref_log_probs=old, entropy=log_probs.detach()
        )
        loss.backward()
        assert loss.isfinite()
        assert log_probs.grad.isfinite().all()
        assert (log_probs.grad[mask == 0] == 0).all()
        assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_a_batch_hidden_whole_gives_zero_with_a_graph(shape: tuple[int, int]) -> None:
    for objective in (CISPO(ratio_max=2.0), GRPO(), CISPO(ratio_max=2.0, sample_share=0.5)):
        for options in (
            {},
            {"group_ids": torch.zeros(shape[0], dtype=torch.long)},
            {"normaliser": (0.0, 0.0)},
        ):
            log_probs = torch.full(shape, math.nan, requires_grad=True)
            loss, metrics = loss_and_metrics(
                log_probs, log_probs.detach(), torch.ones(shape[0]), torch.zeros(shape), objective, **options
            )
            loss.backward()
            assert loss.item() == 0.0
            assert (log_probs.grad == 0).all()
            assert all(math.isfinite(value) for value in metrics.values())


def test_a_response_hidden_whole_leaves_the_loss_of_the_other() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-5.0, -5.0]])
    for objective in (CISPO(ratio_max=2.0), GRPO()):
        both = policy_loss(
            log_probs,
            log_probs,
            torch.ones(2),
            torch.tensor([[1, 1], [0, 0]]),
            objective,
            group_ids=torch.tensor([0, 1]),
        )
        alone = policy_loss(log_probs[:1], log_probs[:1], torch.ones(1), torch.ones(1, 2), objective)
        assert both == alone


def test_log_ratios_cannot_overflow() -> None:
    log_probs = torch.tensor([[0.0, -1e4, 0.0]], requires_grad=True)
    old = torch.tensor([[-1e4, 0.0, -math.inf]])
    for advantage in (1.0, -1.0):
        for objective in (REINFORCE(), GRPO(kl_coefficient=1.0), CISPO(ratio_max=5.0)):
            loss, metrics = loss_and_metrics(
                log_probs, old, torch.tensor([advantage]), torch.ones(1, 3), objective, ref_log_probs=old
            )
            (gradient,) = torch.autograd.grad(loss, log_probs)
            assert loss.isfinite()
            assert gradient.isfinite().all()
            assert all(math.isfinite(value) for value in metrics.values())


def test_half_precision_inputs_are_computed_in_float32() -> None:
    log_probs = torch.tensor([[-1.0, -1.0078125]], dtype=torch.bfloat16, requires_grad=True)
    old = torch.tensor([[-1.001, -1.0]])
    loss, metrics = loss_and_metrics(log_probs, old, torch.ones(1), torch.ones(1, 2), REINFORCE())
    assert loss.dtype == torch.float32
    assert metrics["ratio_largest"] == pytest.approx(math.exp(0.001), rel=1e-5)
    assert metrics["ratio_smallest"] == pytest.approx(math.exp(-0.0078125), rel=1e-5)


def test_metrics_count_what_they_say() -> None:
    ratios = torch.tensor([[2.0, 1.0, 0.5, 1.0], [2.0, 1.0, 0.5, 0.1]])
    old = torch.zeros(2, 4)
    log_probs = ratios.log()
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    entropy = torch.full((2, 4), 0.5)
    dapo = policy_metrics(log_probs, old, advantages, mask, DAPO(), entropy=entropy)
    assert set(dapo) == METRICS | {"entropy"}
    assert dapo["tokens"] == 7
    assert dapo["clipped_positive"] == pytest.approx(1 / 4)  # the 2.0
    assert dapo["clipped_negative"] == pytest.approx(1 / 3)  # the 0.5
    assert dapo["dropped_tokens"] == 2
    assert dapo["dropped"] == pytest.approx(2 / 7)
    assert dapo["entropy"] == pytest.approx(0.5)
    assert dapo["ratio_smallest"] == pytest.approx(0.5)
    assert dapo["ratio_largest"] == pytest.approx(2.0)
    assert dapo["ratio_p50"] == pytest.approx(1.0)
    expected = (ratios - 1 - log_probs)[mask.bool()].mean().item()
    assert dapo["approx_kl"] == pytest.approx(expected, rel=1e-5)
    cispo = policy_metrics(log_probs, old, advantages, mask, CISPO(ratio_max=1.5))
    assert cispo["clipped_positive"] == pytest.approx(1 / 4)
    assert cispo["clipped_negative"] == pytest.approx(1 / 3)
    assert cispo["dropped"] == 0


def test_the_kl_term_pulls_towards_the_reference() -> None:
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0]])
    loss, metrics = loss_and_metrics(
        log_probs,
        log_probs.detach(),
        torch.zeros(1),
        torch.ones(1, 2),
        GRPO(kl_coefficient=0.5),
        ref_log_probs=reference,
    )
    loss.backward()
    d = reference - log_probs.detach()
    kl = (d.exp() - d - 1).mean().item()
    assert metrics["kl_reference"] == pytest.approx(kl)
    assert loss.item() == pytest.approx(0.5 * kl)
    assert torch.allclose(log_probs.grad, 0.5 * (1 - d.exp()) / 2)


def test_bad_input_is_named() -> None:
    x, A = torch.zeros(2, 3), torch.zeros(2)
    call = policy_loss
    cases = [
        ("old_log_probs has shape \\(2, 4\\)", lambda: call(x, torch.zeros(2, 4), A, x, DAPO())),
        ("mask has shape", lambda: call(x, x, A, torch.ones(2), DAPO())),
        ("advantages must be \\(2,\\) or \\(2, 3\\)", lambda: call(x, x, torch.zeros(3), x, DAPO())),
        ("group_ids must be \\(2,\\)", lambda: call(x, x, A, x, DAPO(), group_ids=torch.zeros(3))),
        ("0 and 1 only", lambda: call(x, x, A, x + 0.5, DAPO())),
        ("normaliser must be a positive", lambda: call(x, x, A, x + 1, DAPO(), normaliser=0)),
        ("normaliser must be a positive", lambda: call(x, x, A, x + 1, DAPO(), normaliser=math.nan)),
        ("give normaliser=", lambda: call(x, x, A, x + 1, DAPO(sample_share=0.5), normaliser=4)),
        ("give ref_log_probs", lambda: call(x, x, A, x, GRPO(kl_coefficient=0.1))),
        ("entropy has shape", lambda: policy_metrics(x, x, A, x, DAPO(), entropy=A)),
        ("must be \\(B, T\\)", lambda: call(A, A, A, A, DAPO())),
        ("floating point", lambda: call(x.long(), x, A, x, DAPO())),
        ("sample_share must lie", lambda: DAPO(sample_share=2.0)),
        ("kl_coefficient must be", lambda: GRPO(kl_coefficient=-1.0)),
    ]
    for message, run in cases:
        with pytest.raises(ValueError, match=message):
            run()
