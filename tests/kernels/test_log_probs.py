"""Log-probabilities without logits: the definition's values and gradients in little memory; FP32 head."""

import weakref
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minimax_kernels import fp32_linear, head, token_log_probs
from minimax_kernels.log_probs.reference import token_log_probs_reference

CHUNKS = [1, 100, 1024, 100_000]
MiB = 2**20
with_entropy = partial(token_log_probs, entropy=True)


def inputs(N: int = 9, V: int = 130, M: int = 16, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(N + V)
    hidden, weight = torch.randn(N, M, generator=rng), torch.randn(V, M, generator=rng) / M**0.5
    return [hidden.to(dtype), weight.to(dtype), torch.randint(V, (N,), generator=rng)]


def with_gradients(run, hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """Both results of `run`, and the gradients of a weighted sum of them."""
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    results = run(*leaves, targets)
    scale = torch.linspace(-1, 2, targets.numel()).view(targets.shape)
    grads = torch.autograd.grad([(x * scale).sum() for x in results], leaves)
    return [x.detach() for x in (*results, *grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_chunk", CHUNKS)
@pytest.mark.parametrize("token_chunk", CHUNKS)
def test_any_chunk_gives_the_definition_in_value_and_gradients(
    token_chunk: int, vocab_chunk: int, dtype: torch.dtype
) -> None:
    hidden, weight, targets = inputs(dtype=dtype)
    targets[3] = -100

    chunked = partial(with_entropy, temperature=0.7, token_chunk=token_chunk, vocab_chunk=vocab_chunk)
    found = with_gradients(chunked, hidden, weight, targets)
    exact = with_gradients(
        partial(token_log_probs_reference, temperature=0.7), hidden.double(), weight.double(), targets
    )
    step = torch.finfo(dtype).eps if dtype != torch.float32 else 0
    for value, true, tolerance in zip(found, exact, (1e-6, 1e-6, 1e-5, 1e-5), strict=True):
        # a gradient has its input's type, so it is off by up to half a step of that type
        torch.testing.assert_close(value.double(), true, rtol=max(step, 1e-6), atol=tolerance)
    assert [x.dtype for x in found] == [torch.float32, torch.float32, dtype, dtype]


@given(st.integers(0, 6), st.integers(1, 20), st.integers(1, 9), st.integers(1, 25), st.floats(0.1, 5))
def test_any_shape_gives_the_definition(
    N: int, V: int, token_chunk: int, vocab_chunk: int, temperature: float
) -> None:
    hidden, weight, targets = inputs(N, V, 3, dtype=torch.float64)
    results = token_log_probs(
        hidden, weight, targets,
        temperature=temperature, entropy=True, token_chunk=token_chunk, vocab_chunk=vocab_chunk,
    )  # fmt: skip
    exact = token_log_probs_reference(hidden, weight, targets, temperature=temperature)
    torch.testing.assert_close(results, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_gradients_pass_gradcheck(chunk: int) -> None:
    hidden, weight, targets = inputs(5, 7, 3, dtype=torch.float64)
    targets[1] = -100

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return token_log_probs(
            hidden, weight, targets, temperature=0.7, entropy=True, token_chunk=chunk, vocab_chunk=chunk
        )

    assert torch.autograd.gradcheck(run, (hidden.requires_grad_(), weight.requires_grad_()))


def test_a_gradient_that_nobody_wants_is_not_made() -> None:
    hidden, weight, targets = inputs()
    token_log_probs(hidden.requires_grad_(), weight, targets).sum().backward()
    both = hidden.grad.clone()
    token_log_probs(hidden.detach(), weight.requires_grad_(), targets).sum().backward()
    alone = hidden.detach().requires_grad_()
    token_log_probs(alone, weight, targets).sum().backward()
    assert torch.equal(alone.grad, both)


def test_entropy_alone_can_be_differentiated() -> None:
    hidden, weight, targets = inputs(dtype=torch.float64)
    hidden.requires_grad_()
    (found,) = torch.autograd.grad(token_log_probs(hidden, weight, targets, entropy=True)[1].sum(), hidden)
    (exact,) = torch.autograd.grad(token_log_probs_reference(hidden, weight, targets)[1].sum(), hidden)
    torch.testing.assert_close(found, exact)


def test_temperature_divides_the_logits() -> None:
    """Logits 2, 1, 0 at temperature 0.5: not the value at 1 (-0.407606), nor twice that (-0.815212)."""
    value = token_log_probs(torch.eye(3)[:1], torch.tensor([[2.0, 0, 0], [1, 0, 0], [0, 0, 0]]),
                            torch.tensor([0]), temperature=0.5)  # fmt: skip
    assert value.item() == pytest.approx(-0.142932, abs=1e-6)


def test_ignored_rows_give_zero_and_pass_nothing_on_even_when_they_are_not_finite() -> None:
    hidden, weight, targets = inputs()
    hidden[2], targets[2] = float("nan"), -100
    log_probs, entropy, dhidden, dweight = with_gradients(with_entropy, hidden, weight, targets)
    assert log_probs[2] == 0 and entropy[2] == 0 and not dhidden[2].any()
    assert all(x.isfinite().all() for x in (log_probs, entropy, dhidden, dweight))


@pytest.mark.parametrize("N", [0, 4])
def test_no_row_that_counts_still_gives_gradients_of_zero(N: int) -> None:
    hidden, weight, targets = inputs(N)
    nothing = torch.full_like(targets, -100)
    log_probs, entropy, dhidden, dweight = with_gradients(with_entropy, hidden, weight, nothing)
    assert log_probs.shape == entropy.shape == (N,)
    assert not any(x.any() for x in (log_probs, entropy, dhidden, dweight))


def test_leading_dimensions_are_kept() -> None:
    hidden, weight, targets = inputs(12)
    flat = token_log_probs(hidden, weight, targets)
    deep = token_log_probs(hidden.view(2, 3, 2, 16), weight, targets.view(2, 3, 2))
    assert deep.shape == (2, 3, 2) and torch.equal(deep.flatten(), flat)
    assert token_log_probs(hidden[0], weight, targets[0]).shape == ()


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = inputs()
    log_probs, entropy, dhidden, _ = with_gradients(
        partial(with_entropy, vocab_chunk=7), hidden * 1e4, weight, targets
    )
    exact = token_log_probs_reference(hidden.double() * 1e4, weight.double(), targets)[0]
    torch.testing.assert_close(log_probs.double(), exact, rtol=1e-6, atol=1e-3)
    assert entropy.isfinite().all() and dhidden.isfinite().all()


def test_autocast_changes_nothing() -> None:
    given = inputs()
    outside = with_gradients(with_entropy, *given)
    with torch.autocast("cpu", torch.bfloat16):
        inside = with_gradients(with_entropy, *given)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("token_chunk", [1, 100, 1024])
def test_a_vocabulary_of_200064_gives_the_definition(token_chunk: int) -> None:
    hidden, weight, targets = inputs(8, 200_064, 8)
    found = with_gradients(partial(with_entropy, token_chunk=token_chunk), hidden, weight, targets)
    exact = with_gradients(token_log_probs_reference, hidden.double(), weight.double(), targets)
    for value, true, tolerance in zip(found, exact, (1e-6, 1e-6, 1e-5, 1e-5), strict=True):
        torch.testing.assert_close(value.double(), true, rtol=1e-6, atol=tolerance)


class Memory(TorchDispatchMode):
    """Bytes of the tensors that are alive among those made inside, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage(), given)
        return out

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or key in given:
            return
        self.seen.add(key)
        self.now += size
        self.largest, self.peak = max(self.largest, size), max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def test_the_memory_probe_sees_what_the_plain_form_needs() -> None:
    hidden, weight, targets = inputs(64, 5000, 8)
    with Memory() as memory:
        with_gradients(token_log_probs_reference, hidden, weight, targets)
    assert memory.largest == 64 * 5000 * 4 and memory.peak > 3 * memory.largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_two_chunks_of_logits_are_the_peak_at_vocabulary_200064(entropy: bool, dtype: torch.dtype) -> None:
    N, V, M, token_chunk, vocab_chunk = 256, 200_064, 8, 128, 8192
    hidden, weight, targets = inputs(N, V, M, dtype=dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    chunk = token_chunk * vocab_chunk * 4  # 4 MiB; full logits are 195 MiB
    small = 4 * vocab_chunk * M * 4 + MiB // 4  # chunks of weight and of its gradient; sums over rows
    options = {"entropy": entropy, "token_chunk": token_chunk, "vocab_chunk": vocab_chunk}
    with Memory() as memory:
        results = token_log_probs(hidden, weight, targets, **options)
        forward = memory.peak
        total = sum(results).sum() if entropy else results.sum()
        total.backward()
    dweight = weight.numel() * weight.element_size()
    assert chunk <= forward <= 2 * chunk + small
    assert chunk <= memory.peak <= 2 * chunk + dweight + small
    assert memory.largest <= max(chunk, dweight)


BAD = {
    "got 130 and 8 more outside": lambda h, w, t: token_log_probs(h, w, torch.full_like(t, 130)),
    "got -1 and 8 more outside": lambda h, w, t: token_log_probs(h, w, torch.full_like(t, -1)),
    "finite and above 0, got 0": lambda h, w, t: token_log_probs(h, w, t, temperature=0.0),
    "above 0, got -1": lambda h, w, t: token_log_probs(h, w, t, temperature=-1.0),
    "above 0, got nan": lambda h, w, t: token_log_probs(h, w, t, temperature=float("nan")),
    "one for each token": lambda h, w, t: token_log_probs(h, w, t[1:]),
    "int64": lambda h, w, t: token_log_probs(h, w, t.int()),
    "with one M": lambda h, w, t: token_log_probs(h[:, 1:], w, t),
    "must be floating": lambda h, w, t: token_log_probs(h, w.int(), t),
    "chunks must be 1 or more": lambda h, w, t: token_log_probs(h, w, t, token_chunk=0),
    "V, M.* with one M": lambda h, w, t: fp32_linear(h[:, 1:], w),
}


@pytest.mark.parametrize("rule", BAD)
def test_bad_input_is_refused_with_the_rule(rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        BAD[rule](*inputs())


def test_the_head_keeps_apart_what_bfloat16_logits_tie() -> None:
    hidden = torch.tensor([[1.0, 2**-9]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.bfloat16)
    assert torch.nn.functional.linear(hidden, weight).tolist() == [[1.0, 1.0]]
    expected = [[1.001953125, 1.0]]
    assert fp32_linear(hidden, weight).tolist() == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert fp32_linear(hidden, weight).tolist() == expected
        assert fp32_linear(hidden.float(), weight).tolist() == expected
    assert fp32_linear(hidden, weight).dtype == torch.float32


@pytest.mark.parametrize("weight_type", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden_type", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("N", [1, 8, 70])
def test_head_logits_equal_those_of_float32_inputs(
    N: int, hidden_type: torch.dtype, weight_type: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "SLICE_WEIGHTS", 48 * 100)  # several slices, the last one short
    hidden, weight, _ = inputs(N, 530, 48)
    hidden = hidden.to(hidden_type).view(1, N, 48).requires_grad_()
    weight = weight.to(weight_type).requires_grad_()
    out = fp32_linear(hidden, weight)
    exact = hidden.double() @ weight.double().T
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(fp32_linear(hidden.detach(), weight.detach()), out)
    scale = torch.linspace(-1, 1, out.numel()).view(out.shape)
    found = torch.autograd.grad((out * scale).sum(), (hidden, weight))
    wanted = torch.autograd.grad((exact * scale).sum(), (hidden, weight))
    for value, true, dtype in zip(found, wanted, (hidden_type, weight_type), strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value.float(), true.float(), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_head_gradients_pass_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "SLICE_WEIGHTS", 9)
    hidden, weight, _ = inputs(4, 7, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(fp32_linear, (hidden.requires_grad_(), weight.requires_grad_()))
