"""Laws of lightning attention that hold for any lengths, packings, splits and decays, on every backend."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import LightningInputs, backend_results, lengths, lightning_inputs, packed_lengths

from minimax_kernels import lightning_attention

decays = st.sampled_from([0.0, 1e-5, 0.004, 0.917004, 2.5, 30.0]) | st.floats(0, 3)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * (1 + scale))


def run(inputs: LightningInputs, backend: str, rows: slice, state: torch.Tensor | None):
    return lightning_attention(
        *(x[:, rows] for x in (inputs.q, inputs.k, inputs.v)),
        inputs.log_decay,
        initial_state=state,
        backend=backend,
    )


@given(T=lengths, cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3), decay=decays)
@example(T=37, cuts=[17 / 37, 18 / 37], decay=0.917004)
@example(T=37, cuts=[36 / 37], decay=0.917004)
@example(T=37, cuts=[1 / 37], decay=0.004)
@example(T=37, cuts=[16 / 37, 32 / 37], decay=0.917004)
def test_splitting_a_sequence_changes_nothing(
    backend: str, device: str, T: int, cuts: list[float], decay: float
) -> None:
    inputs = lightning_inputs(B=1, T=T, H=1, log_decay=[-decay], device=device)
    whole, last = run(inputs, backend, slice(None), inputs.state)
    outs, state = [], inputs.state
    for start, end in pairwise([0, *sorted(round(cut * T) for cut in cuts), T]):
        out, state = run(inputs, backend, slice(start, end), state)
        outs.append(out)
    close(torch.cat(outs, dim=1), whole)
    close(state, last)


def test_a_split_at_a_block_boundary_changes_no_bit(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=2, T=200, device=device)
    whole, last = run(inputs, backend, slice(None), inputs.state)
    left, carried = run(inputs, backend, slice(0, 128), inputs.state)
    right, split_last = run(inputs, backend, slice(128, None), carried)
    assert torch.equal(torch.cat([left, right], dim=1), whole) and torch.equal(split_last, last)


@given(sizes=packed_lengths, spare=st.integers(0, 70), decay=decays)
def test_packed_sequences_equal_each_alone(
    backend: str, device: str, sizes: list[int], spare: int, decay: float
) -> None:
    inputs = lightning_inputs(H=1, lengths=sizes, spare=spare, log_decay=[-decay], device=device)
    packed = backend_results(inputs, backend)
    start = 0
    for s, length in enumerate(sizes):
        rows, one = slice(start, start + length), slice(s, s + 1)
        alone = LightningInputs(
            q=inputs.q[:, rows], k=inputs.k[:, rows], v=inputs.v[:, rows], dout=inputs.dout[:, rows],
            state=inputs.state[one], dlast=inputs.dlast[one], log_decay=inputs.log_decay, cu_seqlens=None,
        )  # fmt: skip
        for name, value in backend_results(alone, backend).items():
            close(packed[name][one] if name in ("last", "dstate") else packed[name][:, rows], value)
        start += length
    assert not packed["out"][:, start:].any()


@pytest.mark.parametrize("poison", [7.0, float("nan"), float("inf")], ids=str)
def test_a_document_never_feels_its_neighbours(backend: str, device: str, poison: float) -> None:
    """Bit for bit, outputs and gradients, and even when the neighbour is not finite."""
    inputs = lightning_inputs(lengths=[5, 1, 13, 64, 70], device=device)
    before = backend_results(inputs, backend)
    for x in (inputs.q, inputs.k, inputs.v):
        x[:, 4] = poison
        x[:, 19:83] = poison
    after = backend_results(inputs, backend)
    for rows in (slice(5, 19), slice(83, None)):
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(before[name][:, rows], after[name][:, rows]), name
    for s in (1, 2, 4):
        assert torch.equal(before["last"][s], after["last"][s])
        assert torch.equal(before["dstate"][s], after["dstate"][s])


@given(T=st.integers(1, 150), where=st.floats(0, 1))
def test_a_token_changes_nothing_before_it(backend: str, device: str, T: int, where: float) -> None:
    inputs = lightning_inputs(B=1, T=T, H=1, device=device)
    t = min(T - 1, int(where * T))
    before, _ = run(inputs, backend, slice(None), inputs.state)
    for x in (inputs.q, inputs.k, inputs.v):
        x[:, t:] = float("nan")
    after, _ = run(inputs, backend, slice(0, t), inputs.state)
    poisoned, _ = run(inputs, backend, slice(None), inputs.state)
    close(after, before[:, :t])
    if t % 64 == 0:
        assert torch.equal(poisoned[:, :t], before[:, :t])


@given(T=lengths, decay=decays)
def test_results_are_linear_in_v_and_state_together(backend: str, device: str, T: int, decay: float) -> None:
    one, two = (
        lightning_inputs(B=1, T=T, H=1, log_decay=[-decay], seed=seed, device=device) for seed in (1, 2)
    )
    q, k = one.q, one.k
    results = []
    for v, state in ((one.v, one.state), (two.v, two.state), (one.v + two.v, one.state + two.state)):
        results.append(lightning_attention(q, k, v, one.log_decay, initial_state=state, backend=backend))
    for first, second, both in zip(*results, strict=True):
        close(first + second, both)


@given(T=lengths)
def test_without_decay_it_is_plain_linear_attention(backend: str, device: str, T: int) -> None:
    inputs = lightning_inputs(B=1, T=T, H=1, log_decay=[0.0], state=False, device=device)
    out, last = run(inputs, backend, slice(None), None)
    q, k, v = (x[0, :, 0].double() for x in (inputs.q, inputs.k, inputs.v))
    close(out[0, :, 0], ((q @ k.mT).tril() @ v).float())
    close(last[0, 0], (k.mT @ v).float())


@given(T=st.integers(1, 150))
def test_heads_and_batch_rows_do_not_mix(backend: str, device: str, T: int) -> None:
    inputs = lightning_inputs(B=2, T=T, H=3, device=device)
    whole, last = run(inputs, backend, slice(None), inputs.state)
    b, h = 1, 2
    alone, alone_last = lightning_attention(
        *(x[b : b + 1, :, h : h + 1] for x in (inputs.q, inputs.k, inputs.v)),
        inputs.log_decay[h : h + 1],
        initial_state=inputs.state[b : b + 1, h : h + 1],
        backend=backend,
    )
    close(whole[b : b + 1, :, h : h + 1], alone)
    close(last[b : b + 1, h : h + 1], alone_last)
