"""What only the Triton backend has: segments, a table of tiles, operators of torch.library."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    LightningInputs,
    assert_within_budget,
    backend_results,
    exact_results,
    lightning_inputs,
    results,
)
from torch import Tensor

from minimax_kernels import BlockMemory, lightning_attention, lightning_decode
from minimax_kernels.backends import available

if not find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)

from minimax_kernels.lightning.triton_backward import backward
from minimax_kernels.lightning.triton_forward import forward, sweep
from minimax_kernels.lightning.triton_operator import lightning
from minimax_kernels.lightning.triton_segments import choose_segment_length, partition
from minimax_kernels.lightning.triton_tile import FLOAT, HALF, Tile

pytestmark = pytest.mark.skipif("triton" not in available(), reason="needs a GPU or Triton's interpreter")
TILES = sorted({*HALF.values(), *FLOAT.values()}, key=repr)


def by_hand(inputs: LightningInputs, *, segment_length: int) -> dict[str, Tensor]:
    """Forward and backward below the operator, where the length of segments can be chosen."""
    state, cu_seqlens = inputs.state, inputs.cu_seqlens
    args = inputs.q, inputs.k, inputs.v, inputs.log_decay, state
    out, last, starts = forward(*args, cu_seqlens, segment_length=segment_length)
    gradients = backward(*args, starts, cu_seqlens, inputs.dout, inputs.dlast, segment_length=segment_length)
    dq, dk, dv, dstate = gradients
    return {"out": out, "last": last, "dq": dq, "dk": dk, "dv": dv, "dstate": dstate}


@pytest.mark.parametrize("lengths", [None, [300, 0, 128, 1, 129, 0]], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_segments_meet_the_definition(device: str, lengths: list[int] | None, dtype: torch.dtype) -> None:
    inputs = lightning_inputs(B=2, T=300, H=1, lengths=lengths, spare=5, dtype=dtype, device=device)
    assert_within_budget(by_hand(inputs, segment_length=128), inputs)


@pytest.mark.parametrize("lengths", [None, [300, 0, 131]], ids=["dense", "packed"])
def test_segments_differ_from_one_pass_by_rounding_only(device: str, lengths: list[int] | None) -> None:
    inputs = lightning_inputs(B=2, T=300, H=1, lengths=lengths, device=device)
    whole = by_hand(inputs, segment_length=0)
    for name, value in by_hand(inputs, segment_length=128).items():
        assert (value - whole[name]).norm() <= 2e-7 * whole[name].norm(), name


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), spare=st.integers(0, 40))
def test_segments_tile_every_sequence_in_order(sizes: list[int], spare: int) -> None:
    cu_seqlens = torch.tensor([0, *sizes]).cumsum(0)
    segments = partition(1, sum(sizes) + spare, cu_seqlens, 16)
    bounds, first = segments.bounds.tolist(), segments.first.tolist()
    assert len(bounds) == segments.count + 1 and bounds[-1] == sum(sizes)
    for s, size in enumerate(sizes):
        start = int(cu_seqlens[s])
        cuts = bounds[first[s] : first[s + 1] + 1]
        assert first[s + 1] - first[s] == -(-size // 16)
        if size:
            assert cuts == [min(start + 16 * n, start + size) for n in range(len(cuts))]
    assert set(bounds[first[-1] :]) == {sum(sizes)}


@pytest.mark.parametrize(
    ("T", "H", "S", "wanted"),
    [
        (1 << 20, 8, 1, 4096),
        (1 << 14, 64, 1, 4096),
        (1 << 15, 8, 1, 1024),
        (2048, 8, 1, 0),
        (1 << 15, 64, 8, 0),
    ],
)
def test_segments_are_chosen_by_shape_alone(T: int, H: int, S: int, wanted: int) -> None:
    x = torch.empty(1, T, H, 128, dtype=torch.bfloat16, device="meta")
    assert choose_segment_length(x, x, S) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [None, [4000, 100]], ids=["dense", "packed"])
def test_a_long_call_of_few_heads_takes_segments_by_itself(device: str, lengths: list[int] | None) -> None:
    inputs = lightning_inputs(
        B=1, T=4100, H=1, lengths=lengths, log_decay=[-0.01], dtype=torch.bfloat16, device=device
    )
    args = inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.state, inputs.cu_seqlens
    assert lightning(*args)[2].shape[0] >= 5
    torch.library.opcheck(lightning, args, test_utils="test_faketensor")
    expected = backend_results(inputs.to(torch.float32), "chunked")
    for name, value in backend_results(inputs, "triton").items():
        assert (value - expected[name]).norm() <= 2e-2 * expected[name].norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("T", [64, 130])
def test_every_tile_gives_the_same_outputs(device: str, tile: Tile, dtype: torch.dtype, T: int) -> None:
    if device == "cuda" and dtype == torch.float32 and tile.C == 64:
        pytest.skip("float32 is not offered with this tile: its operands do not fit into registers")
    inputs = lightning_inputs(B=1, T=T, H=1, Dk=64, Dv=64, dtype=dtype, device=device)
    chunked = lightning_attention(
        *(x.float() for x in (inputs.q, inputs.k, inputs.v)), inputs.log_decay, initial_state=inputs.state
    )
    segments = partition(1, T, None, 0)
    found = torch.empty_like(inputs.v), segments.new_states(inputs.k, inputs.v)
    sweep(
        inputs.q, inputs.k, inputs.v, inputs.log_decay, segments,
        state=inputs.state, out=found[0], final_state=found[1], tile=tile,
    )  # fmt: skip
    allowed = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for value, expected in zip(found, chunked, strict=True):
        assert (value.float() - expected).norm() <= allowed * expected.norm()


def test_a_full_tile_is_as_exact_as_float32_when_its_operands_are(device: str) -> None:
    """The 16-bit types' tile of 64 positions, run on float32, shows its formula without their rounding."""
    if device == "cuda":
        pytest.skip("float32 is not offered with this tile")
    inputs = lightning_inputs(B=2, T=200, H=2, Dk=32, Dv=32, device=device)
    segments = partition(2, 200, None, 0)
    found = torch.empty_like(inputs.v), segments.new_states(inputs.k, inputs.v)
    args = inputs.q, inputs.k, inputs.v, inputs.log_decay, segments
    sweep(*args, state=inputs.state, out=found[0], final_state=found[1], tile=HALF[128])
    expected = exact_results(inputs)
    for value, name in zip(found, ("out", "last"), strict=True):
        assert (value - expected[name]).norm() <= 1e-6 * expected[name].norm()


def test_heads_wider_than_a_tile_are_refused() -> None:
    x = torch.zeros(1, 1, 1, 257)
    with pytest.raises(ValueError, match="at most 256"):
        lightning_attention(x, x, x, torch.zeros(1), backend="triton")


@pytest.mark.parametrize("lengths", [None, [5, 0, 70]], ids=["dense", "packed"])
def test_the_operator_is_a_proper_member_of_torch_library(device: str, lengths: list[int] | None) -> None:
    inputs = lightning_inputs(B=2, T=70, H=1, lengths=lengths, device=device)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.state)]
    q, k, v, state = tensors
    torch.library.opcheck(lightning, (q, k, v, inputs.log_decay, state, inputs.cu_seqlens))
    torch.library.opcheck(lightning, (q, k, v, inputs.log_decay, None, inputs.cu_seqlens))


def test_a_compiled_function_holds_the_operator_whole(device: str) -> None:
    compiled = torch.compile(
        lambda *args, **options: lightning_attention(*args, backend="triton", **options),
        fullgraph=True,
        backend="aot_eager",
    )
    for T in (70, 75):  # the second length makes T dynamic
        inputs = lightning_inputs(B=1, T=T, H=1, device=device)
        for name, value in results(inputs, compiled).items():
            assert torch.equal(value, backend_results(inputs, "triton")[name]), name


def test_a_compiled_decode_writes_into_the_cache_it_is_given(device: str) -> None:
    def step(q: Tensor, memory: BlockMemory) -> Tensor:
        return lightning_decode(q, q, q, log_decay, memory, backend="triton") * 2

    log_decay = torch.tensor([-0.5], device=device)
    q = torch.randn(2, 3, 1, 16, device=device)
    memories = [BlockMemory.empty(q, q) for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for t in range(3):
        one = q[:, t : t + 1]
        assert torch.equal(compiled(one, memories[0]), step(one, memories[1]))
    for name in BlockMemory._fields:
        assert torch.equal(getattr(memories[0], name), getattr(memories[1], name)), name
    assert memories[0].cache_seqlens.tolist() == [3, 3]


@pytest.mark.gpu
def test_a_decode_step_captured_in_a_cuda_graph_gives_the_eager_bits() -> None:
    q, k, v = torch.randn(3, 2, 8, 4, 64, device="cuda", dtype=torch.bfloat16)
    log_decay = -torch.rand(4, device="cuda")
    eager, captured, spare = (BlockMemory.empty(k, v) for _ in range(3))
    buffers = [x[:, :1].clone() for x in (q, k, v)]
    lightning_decode(*buffers, log_decay, spare, backend="triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = lightning_decode(*buffers, log_decay, captured, backend="triton")
    for t in range(8):
        for buffer, x in zip(buffers, (q, k, v), strict=True):
            buffer.copy_(x[:, t : t + 1])
        graph.replay()
        assert torch.equal(out, lightning_decode(*buffers, log_decay, eager, backend="triton")), t


def test_a_second_derivative_is_refused_not_wrong(device: str) -> None:
    inputs = lightning_inputs(B=1, T=5, H=1, device=device)
    q = inputs.q.requires_grad_()
    out, _ = lightning_attention(q, inputs.k, inputs.v.requires_grad_(), inputs.log_decay, backend="triton")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        dq.sum().backward()
