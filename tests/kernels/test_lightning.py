"""Every backend of lightning attention against the float64 recurrence: outputs, last state, all gradients."""

import pytest
import torch
from support import assert_within_budget, backend_results, exact_results, lightning_inputs, results
from torch import Tensor

from minimax_kernels import lightning_attention
from minimax_kernels.backends import TRITON_DTYPES

LENGTHS = [1, 2, 8, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 300, 913]
PACKED = [5, 1, 0, 64, 13, 130]


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("state", [True, False], ids=["state", "no_state"])
def test_any_length_meets_the_definition(backend: str, device: str, T: int, state: bool) -> None:
    inputs = lightning_inputs(B=1, T=T, H=2, state=state, device=device, seed=T)
    assert_within_budget(backend_results(inputs, backend), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [None, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("D", [16, 64])
def test_any_type_meets_the_definition(
    backend: str, device: str, dtype: torch.dtype, lengths: list[int] | None, D: int
) -> None:
    inputs = lightning_inputs(B=2, T=150, Dk=D, Dv=D, lengths=lengths, spare=3, dtype=dtype, device=device)
    assert_within_budget(backend_results(inputs, backend), inputs)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
def test_relative_error_is_small_in_absolute_terms(
    backend: str, device: str, dtype: torch.dtype, tolerance: float, T: int
) -> None:
    """The tiles of 16-bit types are other ones than those of float32."""
    inputs = lightning_inputs(B=1, T=T, H=1, Dk=32, Dv=32, dtype=dtype, device=device, seed=T)
    exact = exact_results(inputs)
    for name, value in backend_results(inputs, backend).items():
        assert (value - exact[name]).norm() <= tolerance * exact[name].norm(), name


WIDTHS = [
    (32, 32),
    (128, 128),
    (256, 256),
    (80, 80),
    (96, 96),
    (192, 192),
    (16, 128),
    (128, 32),
    (20, 12),
    (1, 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_any_head_width_meets_the_definition(
    backend: str, device: str, dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    Dk, Dv = widths
    inputs = lightning_inputs(B=1, T=70, H=1, Dk=Dk, Dv=Dv, dtype=dtype, device=device)
    assert_within_budget(backend_results(inputs, backend), inputs)


def test_bounds_may_be_int64(backend: str, device: str) -> None:
    inputs = lightning_inputs(lengths=PACKED, device=device)
    wide = inputs.cu_seqlens.to(torch.int64)
    args = inputs.q, inputs.k, inputs.v, inputs.log_decay
    out, last = lightning_attention(
        *args, initial_state=inputs.state, cu_seqlens=inputs.cu_seqlens, backend=backend
    )
    out64, last64 = lightning_attention(*args, initial_state=inputs.state, cu_seqlens=wide, backend=backend)
    assert torch.equal(out, out64) and torch.equal(last, last64)


def ones(T: int, decay: float, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.ones(1, T, 1, 1, device=device)
    return x, x, x, torch.tensor([-decay], device=device)


def test_ones_with_half_decay_add_up_to_two(backend: str, device: str) -> None:
    out, _ = lightning_attention(*ones(5, 0.6931471805599453, device), backend=backend)
    torch.testing.assert_close(out.flatten().cpu(), torch.tensor([1, 1.5, 1.75, 1.875, 1.9375]))


@pytest.mark.parametrize(("slope", "limit"), [(0.917004, 1.66587), (5.0, 1.00678), (50.0, 1.0)])
def test_ones_tend_to_the_geometric_sum(backend: str, device: str, slope: float, limit: float) -> None:
    out, _ = lightning_attention(*ones(256, slope, device), backend=backend)
    assert abs(float(out[0, -1, 0, 0]) - limit) < 1e-5


def test_ones_without_decay_count_positions(backend: str, device: str) -> None:
    out, _ = lightning_attention(*ones(300, 0.0, device), backend=backend)
    assert out.flatten().tolist() == [float(t) for t in range(1, 301)]


@pytest.mark.parametrize("slope", [0.0, 0.917004, 1.9, 2.1, 5.0, 50.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_and_strong_decay_meet_the_definition(
    backend: str, device: str, slope: float, dtype: torch.dtype
) -> None:
    inputs = lightning_inputs(B=1, T=257, H=1, log_decay=[-slope], dtype=dtype, device=device)
    # exp(-50) itself has a relative error of 50 float32 steps where the exponent was rounded to float32.
    assert_within_budget(backend_results(inputs, backend), inputs, steps=4 + min(60, int(slope)))


def test_views_of_one_fused_projection_are_read_in_place(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=2, T=70, Dk=16, Dv=16, device=device)
    fused = torch.cat([inputs.q, inputs.k, inputs.v], dim=-1)  # (B, T, H, 3D)
    q, k, v = fused.split(16, dim=-1)
    args = {"initial_state": inputs.state, "backend": backend}
    out, last = lightning_attention(q, k, v, inputs.log_decay, **args)
    copied, copied_last = lightning_attention(inputs.q, inputs.k, inputs.v, inputs.log_decay, **args)
    assert torch.equal(out, copied) and torch.equal(last, copied_last)


@pytest.mark.parametrize("layout", ["heads_first", "time_reversed_copy", "broadcast", "odd_offset", "step_2"])
def test_any_stride_gives_the_same_result(backend: str, device: str, layout: str) -> None:
    inputs = lightning_inputs(B=2, T=70, Dk=16, Dv=16, device=device)

    def relaid(x: Tensor) -> Tensor:
        if layout == "heads_first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "time_reversed_copy":
            return x.flip(1).contiguous().flip(1)
        if layout == "broadcast":
            return x[:1].expand_as(x)
        if layout == "odd_offset":
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
        return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]

    laid = [relaid(x) for x in (inputs.q, inputs.k, inputs.v)]
    plain = [x.clone(memory_format=torch.contiguous_format) for x in laid]
    out, last = lightning_attention(*laid, inputs.log_decay, backend=backend)
    expected, expected_last = lightning_attention(*plain, inputs.log_decay, backend=backend)
    assert torch.equal(out, expected) and torch.equal(last, expected_last)


def test_a_gradient_that_was_expanded_is_read_right(backend: str, device: str) -> None:
    inputs = lightning_inputs(T=70, device=device)
    v = inputs.v.requires_grad_()
    out, last = lightning_attention(inputs.q, inputs.k, v, inputs.log_decay, backend=backend)
    (expanded,) = torch.autograd.grad(out.sum() + last.sum(), v, retain_graph=True)
    (plain,) = torch.autograd.grad([out, last], v, [torch.ones_like(out), torch.ones_like(last)])
    torch.testing.assert_close(expanded, plain, rtol=1e-6, atol=1e-6)


def test_rows_past_the_last_bound_give_zeros_whatever_they_hold(backend: str, device: str) -> None:
    inputs = lightning_inputs(lengths=[70, 3], spare=90, device=device)
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[:, 73:] = float("nan")
    found = backend_results(inputs, backend)
    for name in ("out", "dq", "dk", "dv"):
        assert not found[name][:, 73:].any(), name
        assert bool(found[name].isfinite().all()), name
    assert bool(found["last"].isfinite().all()) and bool(found["dstate"].isfinite().all())


@pytest.mark.parametrize("shape", [(2, 0, 2), (0, 5, 2), (2, 5, 0)], ids=["no_time", "no_batch", "no_heads"])
def test_nothing_in_gives_nothing_out_and_keeps_the_state(
    backend: str, device: str, shape: tuple[int, int, int]
) -> None:
    B, T, H = shape
    inputs = lightning_inputs(B=B, T=T, H=H, device=device)
    found = backend_results(inputs, backend)
    assert found["out"].shape == (B, T, H, 16)
    if T == 0:
        assert torch.equal(found["last"], inputs.state) and torch.equal(found["dstate"], inputs.dlast)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 3, 0]], ids=str)
def test_empty_sequences_keep_their_state(backend: str, device: str, lengths: list[int]) -> None:
    inputs = lightning_inputs(lengths=lengths, spare=2, device=device)
    found = backend_results(inputs, backend)
    for s, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(found["last"][s], inputs.state[s])
            assert torch.equal(found["dstate"][s], inputs.dlast[s])
    assert not found["out"][:, sum(lengths) :].any()


def test_the_state_that_was_passed_in_is_not_written(backend: str, device: str) -> None:
    inputs = lightning_inputs(T=70, device=device)
    before = inputs.state.clone()
    _, last = lightning_attention(
        inputs.q, inputs.k, inputs.v, inputs.log_decay, initial_state=inputs.state, backend=backend
    )
    last.add_(1)
    assert torch.equal(inputs.state, before)


def test_autocast_changes_nothing(backend: str, device: str) -> None:
    inputs = lightning_inputs(T=70, device=device)
    plain = backend_results(inputs, backend)

    def run(*args: Tensor, **options: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16):
            return lightning_attention(*args, backend=backend, **options)

    for name, value in results(inputs, run).items():
        assert torch.equal(value, plain[name]), name


def test_float64_is_computed_in_float64_or_refused(backend: str, device: str) -> None:
    inputs = lightning_inputs(T=70, dtype=torch.float64, device=device)
    if backend == "triton":
        with pytest.raises(ValueError, match="backend='chunked'"):
            backend_results(inputs, backend)
        assert torch.float64 not in TRITON_DTYPES
        return
    exact = exact_results(inputs)
    for name, value in backend_results(inputs, backend).items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, exact[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"q": torch.zeros(2, 5, 2)}, "q must be"),
        ({"k": torch.zeros(2, 5, 2, 8)}, "equal in shape"),
        ({"v": torch.zeros(2, 4, 2, 16)}, "equal in shape"),
        ({"v": torch.zeros(2, 5, 2, 16, dtype=torch.float64)}, "one floating type"),
        ({"log_decay": torch.zeros(3)}, r"log_decay must be \(2,\)"),
        ({"log_decay": torch.tensor([0.0, 0.5])}, "at most 0"),
        ({"log_decay": torch.tensor([0.0, float("nan")])}, "at most 0"),
        ({"log_decay": torch.zeros(2, requires_grad=True)}, "constant of the layer"),
        ({"initial_state": torch.zeros(1, 2, 16, 16)}, "one state for each sequence"),
        ({"initial_state": torch.zeros(2, 2, 16, 16, dtype=torch.bfloat16)}, "state must be torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "flatten it with"),
        ({"backend": "cuda"}, "is unknown"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(change: dict, complaint: str) -> None:
    x = torch.zeros(2, 5, 2, 16)
    arguments = {"q": x, "k": x, "v": x, "log_decay": -torch.ones(2)} | change
    with pytest.raises(ValueError, match=complaint):
        lightning_attention(**arguments)
