"""What several test files need: random inputs, the definition in float64, and how large an error may be."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from minimax_kernels import lightning_attention

# A sequence's length as users meet it: around the block of 64, around powers of two, and anything small.
lengths = st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129]) | st.integers(0, 150)
packed_lengths = st.lists(lengths, min_size=1, max_size=5)


@dataclass(frozen=True)
class LightningInputs:
    """Arguments of `lightning_attention`, and the gradients that reach its two results."""

    q: Tensor  # (B, T, H, Dk)
    k: Tensor  # (B, T, H, Dk)
    v: Tensor  # (B, T, H, Dv)
    log_decay: Tensor  # (H,)
    state: Tensor | None  # (S, H, Dk, Dv)
    cu_seqlens: Tensor | None  # (S + 1,)
    dout: Tensor  # (B, T, H, Dv)
    dlast: Tensor  # (S, H, Dk, Dv)

    def to(self, dtype: torch.dtype) -> "LightningInputs":
        """The same values with operands in `dtype`; memory is float32, or float64 with float64 operands."""
        work = torch.float64 if dtype == torch.float64 else torch.float32
        state = None if self.state is None else self.state.to(work)
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        return replace(self, q=q, k=k, v=v, dout=dout, state=state, dlast=self.dlast.to(work))


def lightning_inputs(
    B: int = 2,
    T: int = 80,
    H: int = 2,
    Dk: int = 16,
    Dv: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    lengths: list[int] | None = None,
    spare: int = 0,
    state: bool = True,
    log_decay: list[float] | None = None,
    seed: int = 0,
) -> LightningInputs:
    """Random inputs; `lengths` makes them packed, with `spare` rows past the last bound."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(device)

    cu_seqlens = None
    if lengths is not None:
        B, T = 1, sum(lengths) + spare
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    S = B if lengths is None else len(lengths)
    decay = log_decay if log_decay is not None else torch.linspace(-0.917004, -0.004, H).tolist()
    inputs = LightningInputs(
        q=normal(B, T, H, Dk),
        k=normal(B, T, H, Dk) * Dk**-0.5,
        v=normal(B, T, H, Dv),
        log_decay=torch.tensor(decay, dtype=torch.float32, device=device),
        state=normal(S, H, Dk, Dv) if state else None,
        cu_seqlens=cu_seqlens,
        dout=normal(B, T, H, Dv),
        dlast=normal(S, H, Dk, Dv),
    )
    return inputs.to(dtype)


def results(inputs: LightningInputs, run: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """out, last and the gradients dq, dk, dv, dstate of `run(q, k, v, log_decay, state=, cu_seqlens=)`."""
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "state": inputs.state}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items() if x is not None}
    state = leaves.get("state")
    out, last = run(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        inputs.log_decay,
        initial_state=state,
        cu_seqlens=inputs.cu_seqlens,
    )
    # A result that no input reaches, such as the rows of empty sequences, is a constant.
    reached = [(x, dx) for x, dx in ((out, inputs.dout), (last, inputs.dlast)) if x.requires_grad]
    grads = [torch.zeros_like(x) for x in leaves.values()]
    if reached:
        outputs, weights = zip(*reached, strict=True)
        grads = torch.autograd.grad(outputs, list(leaves.values()), weights, materialize_grads=True)
    found = {"out": out.detach(), "last": last.detach()}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def backend_results(inputs: LightningInputs, backend: str) -> dict[str, Tensor]:
    return results(inputs, lambda *args, **kwargs: lightning_attention(*args, backend=backend, **kwargs))


def exact_results(inputs: LightningInputs) -> dict[str, Tensor]:
    """The definition, token by token, in float64."""
    return backend_results(inputs.to(torch.float64), "reference")


def plain_results(inputs: LightningInputs) -> list[dict[str, Tensor]]:
    """The two textbook forms in the type of the inputs: quadratic in T, and step by step (float32 state)."""
    return [results(inputs, _plain_formula), backend_results(inputs, "reference")]


def _plain_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    B, T, H, Dk = q.shape
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    S = B if cu_seqlens is None else len(bounds) - 1
    state = initial_state
    if state is None:
        state = torch.zeros(S, H, Dk, v.shape[-1], device=q.device)
    outs, lasts = [], []
    for s, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        first = state if cu_seqlens is None else state[s : s + 1]
        out, last = _plain_sequence(*(x[:, start:end].transpose(1, 2) for x in (q, k, v)), log_decay, first)
        outs.append(out.transpose(1, 2))
        lasts.append(last)
    outs.append(torch.zeros_like(v[:, bounds[-1] :]))
    return torch.cat(outs, dim=1), torch.cat(lasts)


def _plain_sequence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    i = torch.arange(q.shape[2], device=q.device)
    g = log_decay[:, None]  # (H, 1)
    distance = i[:, None] - i
    weight = ((g[..., None] * distance.clamp(min=0)).exp() * (distance >= 0)).to(q.dtype)  # (H, T, T)
    reach = (g * (i + 1)).exp().to(q.dtype)[..., None]
    to_end = (g * (len(i) - 1 - i)).exp().to(q.dtype)[..., None]
    out = (q @ k.mT * weight) @ v + (q * reach) @ state.to(q.dtype)
    return out, (g * len(i)).exp()[..., None] * state + (k.mT @ (v * to_end)).float()


def error_budget(plain: list[Tensor], exact: Tensor, *, steps: int = 4) -> float:
    """Twice the larger error of the plain forms in the same type, and a little of the largest value: half a
    step of its type for storing it, and `steps` of float32 for another order of sums."""
    if not exact.numel():
        return 0.0
    error = max(float((form.double() - exact.double()).abs().max()) for form in plain)
    rounding = torch.finfo(plain[0].dtype).eps / 2 + steps * torch.finfo(torch.float32).eps
    return 2 * error + rounding * float(exact.abs().max())


def assert_within_budget(found: dict[str, Tensor], inputs: LightningInputs, *, steps: int = 4) -> None:
    """Every result is finite and no further from the float64 definition than `error_budget` allows."""
    exact = exact_results(inputs)
    plain = plain_results(inputs)
    assert found.keys() == exact.keys()
    for name, value in found.items():
        forms = [form[name] for form in plain]
        assert value.shape == exact[name].shape and value.dtype == forms[0].dtype, name
        assert bool(value.isfinite().all()), f"{name} is not finite"
        error = float((value.double() - exact[name]).abs().max()) if value.numel() else 0.0
        allowed = error_budget(forms, exact[name], steps=steps)
        assert error <= allowed, f"{name} is off by {error:.3g}, allowed are {allowed:.3g}"
