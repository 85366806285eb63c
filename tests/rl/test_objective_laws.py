"""Laws of the objective on random batches: gradients, equivalences, and what must change nothing."""

import math
import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minimax_hybrid.rl.objective import CISPO, DAPO, GRPO, REINFORCE, Objective, policy_loss

OBJECTIVES = [
    CISPO(ratio_max=1.5),
    CISPO(ratio_max=1.5, ratio_min=0.7, sample_share=0.3),
    DAPO(),
    GRPO(),
    GRPO(kl_coefficient=0.2),
    REINFORCE(),
]
objectives = st.sampled_from(OBJECTIVES)
seeds = st.integers(0, 10_000)


class Batch:
    """B responses of up to T tokens with ratios around 1, in float64."""

    def __init__(self, seed: int, B: int = 6, T: int = 7) -> None:
        make = torch.Generator().manual_seed(seed)
        self.old = -3 * torch.rand(B, T, generator=make, dtype=torch.float64)
        self.new = self.old + 0.5 * torch.randn(B, T, generator=make, dtype=torch.float64)
        self.reference = self.old + 0.1 * torch.randn(B, T, generator=make, dtype=torch.float64)
        self.advantages = torch.randn(B, generator=make, dtype=torch.float64)
        lengths = torch.randint(0, T + 1, (B,), generator=make)
        lengths[0] = T
        self.mask = torch.arange(T) < lengths[:, None]
        self.groups = torch.randint(0, 3, (B,), generator=make)

    def loss_and_gradient(self, objective: Objective, **options: object) -> tuple[Tensor, Tensor]:
        new = self.new.clone().requires_grad_()
        loss = policy_loss(
            new, self.old, self.advantages, self.mask, objective, ref_log_probs=self.reference, **options
        )
        (gradient,) = torch.autograd.grad(loss, new)
        return loss.detach(), gradient

    def rows(self, order: Tensor) -> "Batch":
        part = object.__new__(Batch)
        part.__dict__ = {name: value[order] for name, value in self.__dict__.items()}
        return part


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@given(seeds)
def test_at_ratio_one_every_setting_with_the_same_mean_is_the_policy_gradient(seed: int) -> None:
    batch = Batch(seed)
    batch.old = batch.new
    for share in (0.0, 1.0):
        settings = [
            CISPO(ratio_max=1.5, sample_share=share),
            DAPO(sample_share=share),
            GRPO(sample_share=share),
            REINFORCE(sample_share=share),
        ]
        new = batch.new.clone().requires_grad_()
        per_token = -(batch.advantages[:, None] * new)[batch.mask]
        lengths = batch.mask.sum(1)
        per_row = -(batch.advantages[:, None] * new * batch.mask).sum(1)[lengths > 0] / lengths[lengths > 0]
        plain = per_row.mean() if share else per_token.mean()
        (expected,) = torch.autograd.grad(plain, new)
        for objective in settings:
            assert close(batch.loss_and_gradient(objective)[1], expected)


@given(seeds)
def test_the_mask_form_has_the_gradient_of_the_clipped_minimum(seed: int) -> None:
    batch = Batch(seed)
    for low, high in ((0.8, 1.28), (0.8, 1.2), (0.5, 3.0)):
        new = batch.new.clone().requires_grad_()
        r, A = (new - batch.old).exp(), batch.advantages[:, None]
        surrogate = torch.minimum(r * A, r.clamp(low, high) * A)
        (expected,) = torch.autograd.grad(-surrogate[batch.mask].mean(), new)
        assert close(batch.loss_and_gradient(DAPO(trust_min=low, trust_max=high))[1], expected)


@given(seeds)
def test_cispo_drops_no_token_and_its_gradient_is_the_clipped_weight(seed: int) -> None:
    batch = Batch(seed)
    _, gradient = batch.loss_and_gradient(CISPO(ratio_max=1.2))
    r = (batch.new - batch.old).exp()
    expected = -(r.clamp(max=1.2) * batch.advantages[:, None]).masked_fill(~batch.mask, 0) / batch.mask.sum()
    assert close(gradient, expected)
    assert (gradient[batch.mask] != 0).all()


@given(seeds)
def test_cispo_without_a_bound_is_reinforce(seed: int) -> None:
    batch = Batch(seed)
    loose, plain = (batch.loss_and_gradient(o) for o in (CISPO(ratio_max=math.inf), REINFORCE()))
    assert torch.equal(loose[0], plain[0])
    assert torch.equal(loose[1], plain[1])


@given(seeds, objectives, st.sampled_from([1, 2, 3, 6]))
def test_any_split_with_the_whole_batchs_normaliser_gives_the_same(
    seed: int, objective: Objective, parts: int
) -> None:
    batch = Batch(seed)
    whole_loss, whole_gradient = batch.loss_and_gradient(objective)
    normaliser = (float(batch.mask.sum()), float((batch.mask.sum(1) > 0).sum()))
    pieces = [
        batch.rows(rows).loss_and_gradient(objective, normaliser=normaliser)
        for rows in torch.arange(6).chunk(parts)
    ]
    assert close(sum(loss for loss, _ in pieces), whole_loss)
    assert close(torch.cat([gradient for _, gradient in pieces]), whole_gradient)


@given(seeds, objectives)
def test_groups_are_the_mean_of_each_group_alone(seed: int, objective: Objective) -> None:
    batch = Batch(seed)
    loss, _ = batch.loss_and_gradient(objective, group_ids=batch.groups)
    alone = [
        batch.rows(batch.groups == group).loss_and_gradient(objective)[0]
        for group in batch.groups.unique()
        if batch.mask[batch.groups == group].any()
    ]
    assert close(loss, torch.stack(alone).mean())


@given(seeds, objectives, st.randoms(use_true_random=False))
def test_order_padding_and_names_of_groups_change_nothing(
    seed: int, objective: Objective, random: object
) -> None:
    batch = Batch(seed)
    loss, gradient = batch.loss_and_gradient(objective, group_ids=batch.groups)
    order = list(range(6))
    random.shuffle(order)
    order = torch.tensor(order)
    moved = batch.rows(order)
    moved_loss, moved_gradient = moved.loss_and_gradient(objective, group_ids=moved.groups * 11 - 5)
    assert close(moved_loss, loss)
    assert close(moved_gradient, gradient[order])

    padded = object.__new__(Batch)
    padded.__dict__ = dict(batch.__dict__)
    for name in ("old", "new", "reference"):
        junk = torch.full((6, 3), math.nan, dtype=torch.float64)
        setattr(padded, name, torch.cat([junk, getattr(batch, name), junk], 1))
    padded.mask = torch.nn.functional.pad(batch.mask, (3, 3))
    padded_loss, padded_gradient = padded.loss_and_gradient(objective, group_ids=batch.groups)
    assert close(padded_loss, loss)
    assert close(padded_gradient[:, 3:-3], gradient)
    assert (padded_gradient[:, :3] == 0).all()


@given(seeds, objectives)
def test_an_advantage_per_response_is_that_advantage_at_every_token(seed: int, objective: Objective) -> None:
    batch = Batch(seed)
    per_row = batch.loss_and_gradient(objective)
    batch.advantages = batch.advantages[:, None].expand(6, 7)
    per_token = batch.loss_and_gradient(objective)
    assert torch.equal(per_row[0], per_token[0])
    assert torch.equal(per_row[1], per_token[1])


@given(seeds, objectives)
def test_only_log_probs_receive_a_gradient(seed: int, objective: Objective) -> None:
    batch = Batch(seed)
    inputs = [x.clone().requires_grad_() for x in (batch.new, batch.old, batch.advantages, batch.reference)]
    new, old, advantages, reference = inputs
    loss = policy_loss(new, old, advantages, batch.mask, objective, ref_log_probs=reference)
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    assert gradients[0] is not None
    assert gradients[1:] == (None, None, None)


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    summed = []
    for objective in OBJECTIVES:
        batch = Batch(7)
        counts = (float(batch.mask.sum()), float((batch.mask.sum(1) > 0).sum()))
        part = batch.rows(torch.arange(6)[rank::2])
        _, gradient = part.loss_and_gradient(objective, normaliser=counts)
        whole = torch.zeros(6, 7, dtype=torch.float64)
        whole[rank::2] = gradient
        dist.all_reduce(whole)
        summed.append(whole)
    if rank == 0:
        torch.save(summed, f"{folder}/gradients.pt")
    dist.destroy_process_group()


def test_two_ranks_sum_to_the_gradient_of_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in any state
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path))) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    for summed, objective in zip(torch.load(tmp_path / "gradients.pt"), OBJECTIVES, strict=True):
        assert close(summed, Batch(7).loss_and_gradient(objective)[1])
