"""The objective inside verl's own loss function, on verl's tensors (nested, unpadded)."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minimax_hybrid.rl.objective import CISPO, DAPO, GRPO, Objective, policy_loss

pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed", exc_type=ImportError)

from tensordict import TensorDict  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

from minimax_hybrid.rl.plugins.verl_plugin import register  # noqa: E402

PROMPT, RESPONSE = [2, 3, 1], [4, 1, 3]


class Case:
    """Three responses of 4, 1 and 3 tokens, as verl's actor sees them."""

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(0)
        B, T = len(RESPONSE), max(RESPONSE)
        self.mask = torch.arange(T) < torch.tensor(RESPONSE)[:, None]
        self.old = (-2 * torch.rand(B, T, generator=make)) * self.mask
        self.advantages = torch.randn(B, 1, generator=make) * self.mask
        lengths = [p + r for p, r in zip(PROMPT, RESPONSE, strict=True)]
        self.flat = (-2 * torch.rand(sum(lengths), generator=make)).requires_grad_()
        self.offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])

    def new(self, flat: Tensor) -> Tensor:
        """(B, T) log-probs of the responses: position t is scored one row earlier."""
        rows = []
        for end, length in zip(self.offsets[1:].tolist(), RESPONSE, strict=True):
            rows.append(
                torch.nn.functional.pad(flat[end - length - 1 : end - 1], (0, max(RESPONSE) - length))
            )
        return torch.stack(rows)

    def verl_loss(self, loss_mode: str, mean: str, *, dp_size: int, counts: bool) -> tuple[Tensor, dict]:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            loss_agg_mode=mean,
            policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        )
        data = TensorDict(
            {
                "prompts": nested([torch.zeros(length, dtype=torch.long) for length in PROMPT]),
                "responses": nested([torch.zeros(length, dtype=torch.long) for length in RESPONSE]),
                "response_mask": nested([torch.ones(length, dtype=torch.long) for length in RESPONSE]),
                "old_log_probs": nested([row[m] for row, m in zip(self.old, self.mask, strict=True)]),
                "advantages": nested([row[m] for row, m in zip(self.advantages, self.mask, strict=True)]),
            },
            batch_size=[len(RESPONSE)],
        )
        tensordict_utils.assign_non_tensor(
            data,
            dp_size=dp_size,
            batch_num_tokens=16 if counts else None,
            global_batch_size=6 if counts else None,
        )
        flat = torch.nested.nested_tensor_from_jagged(self.flat, offsets=self.offsets)
        return ppo_loss(config, {"log_probs": flat}, data)


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize(
    ("objective", "mean"),
    [(CISPO(ratio_max=1.3), "token-mean"), (DAPO(), "token-mean"), (GRPO(), "seq-mean-token-mean")],
    ids=["cispo", "dapo", "grpo"],
)
@pytest.mark.parametrize("counts", [True, False])
def test_verls_loss_is_ours_value_and_gradient(objective: Objective, mean: str, counts: bool) -> None:
    register("ours", objective)
    case = Case()
    ranks = 2 if counts else 1
    loss, metrics = case.verl_loss("ours", mean, dp_size=ranks, counts=counts)
    (gradient,) = torch.autograd.grad(loss, case.flat)

    N = {"token-mean": 16.0, "seq-mean-token-mean": 6.0}[mean] if counts else None
    ours = policy_loss(case.new(case.flat), case.old, case.advantages, case.mask, objective, normaliser=N)
    (expected,) = torch.autograd.grad(ours * ranks, case.flat)
    assert torch.allclose(loss, ours * ranks)
    assert torch.allclose(gradient, expected)
    assert gradient.abs().sum() > 0
    assert "actor/dropped_tokens" in metrics


def test_cispo_agrees_with_verls_own_once_its_offsets_are_set() -> None:
    register("ours", CISPO(ratio_max=1.2, ratio_min=0.8))
    ours, theirs = (
        Case().verl_loss(mode, "token-mean", dp_size=1, counts=False)[0] for mode in ("ours", "cispo")
    )
    assert torch.allclose(ours, theirs)


def test_the_example_registers_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    importlib.import_module("verl_losses")
    for mode in ("m1_cispo", "m1_dapo"):
        assert Case().verl_loss(mode, "token-mean", dp_size=1, counts=False)[0].isfinite()


def test_what_verl_cannot_express_is_refused() -> None:
    with pytest.raises(ValueError, match="use_kl_loss"):
        register("bad", GRPO(kl_coefficient=0.1))
    with pytest.raises(ValueError, match="sample_share must be 0 or 1"):
        register("bad", CISPO(ratio_max=2.0, sample_share=0.5))
    register("tokens", DAPO())
    with pytest.raises(ValueError, match="make them agree"):
        Case().verl_loss("tokens", "seq-mean-token-mean", dp_size=1, counts=False)
    with pytest.raises(ValueError, match="batch_num_tokens of the whole batch is needed"):
        Case().verl_loss("tokens", "token-mean", dp_size=2, counts=False)
