"""Decode replays the open block: the row it gives is the forward's row, bit for bit, on each backend."""

import pytest
import torch
from support import LightningInputs, lightning_inputs
from torch import Tensor

from minimax_kernels import BLOCK, lightning_attention, lightning_decode

DTYPES = [torch.float32, torch.bfloat16]


class Memory:
    """The cache of one layer in its simplest form; what was never written is NaN."""

    def __init__(self, inputs: LightningInputs, *, rows: int = BLOCK) -> None:
        B, _, H, Dk = inputs.q.shape
        Dv = inputs.v.shape[-1]
        self.inputs = inputs
        self.state = torch.zeros(B, H, Dk, Dv, device=inputs.q.device)
        self.k_cache = inputs.k.new_full((B, rows, H, Dk), float("nan"))
        self.v_cache = inputs.v.new_full((B, rows, H, Dv), float("nan"))
        self.counts = torch.zeros(B, dtype=torch.int64, device=inputs.q.device)

    def prefill(self, b: int, positions: int, backend: str) -> None:
        """Sequence b after its first `positions` tokens; a block that is just full is not yet folded."""
        boundary = max(0, positions - 1) // BLOCK * BLOCK
        rows = slice(boundary, positions)
        self.state[b] = forward(self.inputs, slice(0, boundary), backend)[1][b]
        self.counts[b] = positions - boundary
        self.k_cache[b, : positions - boundary] = self.inputs.k[b, rows]
        self.v_cache[b, : positions - boundary] = self.inputs.v[b, rows]

    def step(self, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        return lightning_decode(
            q, k, v, self.inputs.log_decay, state=self.state, k_cache=self.k_cache, v_cache=self.v_cache,
            counts=self.counts, backend=backend,
        )  # fmt: skip

    def feed(self, positions: range, backend: str) -> Tensor:
        inputs = self.inputs
        outs = [
            self.step(*(x[:, t : t + 1] for x in (inputs.q, inputs.k, inputs.v)), backend) for t in positions
        ]
        return torch.cat(outs, dim=1)


def forward(inputs: LightningInputs, positions: slice, backend: str) -> tuple[Tensor, Tensor]:
    rows = (x[:, positions] for x in (inputs.q, inputs.k, inputs.v))
    return lightning_attention(*rows, inputs.log_decay, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_step_by_step_is_the_forward_bit_for_bit(
    backend: str, device: str, dtype: torch.dtype
) -> None:
    inputs = lightning_inputs(B=1, T=131, H=1, dtype=dtype, device=device)
    memory = Memory(inputs)
    stepped = memory.feed(range(131), backend)
    assert torch.equal(stepped, forward(inputs, slice(None), backend)[0])
    assert torch.equal(memory.state, forward(inputs, slice(0, 128), backend)[1])
    assert memory.counts.tolist() == [3]
    assert torch.equal(memory.k_cache[:, :3], inputs.k[:, 128:])
    assert torch.equal(memory.v_cache[:, :3], inputs.v[:, 128:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (80, 48), (16, 128), (20, 12)], ids=str)
def test_decode_after_prefill_is_the_forward_bit_for_bit(
    backend: str, device: str, dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    inputs = lightning_inputs(B=2, T=66, Dk=widths[0], Dv=widths[1], dtype=dtype, device=device)
    memory = Memory(inputs)
    for b in range(2):
        memory.prefill(b, 62, backend)
    stepped = memory.feed(range(62, 66), backend)
    assert torch.equal(stepped, forward(inputs, slice(None), backend)[0][:, 62:])


def test_sequences_at_different_positions_are_stepped_together(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=5, T=130, H=1, device=device)
    memory, held = Memory(inputs), [0, 1, 63, 64, 129]
    for b, positions in enumerate(held):
        memory.prefill(b, positions, backend)
    row = torch.arange(5, device=device), torch.tensor(held, device=device)
    out = memory.step(*(x[row][:, None] for x in (inputs.q, inputs.k, inputs.v)), backend)
    assert torch.equal(out[:, 0], forward(inputs, slice(None), backend)[0][row])
    assert memory.counts.tolist() == [1, 2, 64, 1, 2]


def test_rows_of_the_last_call_can_be_taken_back(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=2, T=66, H=1, device=device)
    memory = Memory(inputs, rows=BLOCK + 3)
    for b in range(2):
        memory.prefill(b, 64, backend)
    memory.counts -= 3
    again = memory.feed(range(61, 66), backend)
    assert torch.equal(again, forward(inputs, slice(None), backend)[0][:, 61:])


def test_rows_and_state_may_be_views_of_a_larger_cache(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=2, T=67, H=1, device=device)
    plain, viewed = Memory(inputs), Memory(inputs)
    for memory in (plain, viewed):
        for name in ("state", "k_cache", "v_cache", "counts") if memory is viewed else ():
            x = getattr(viewed, name)
            setattr(viewed, name, torch.stack([x, torch.full_like(x, 7)], dim=1)[:, 0])
        for b in range(2):
            memory.prefill(b, 63, backend)
    assert torch.equal(viewed.feed(range(63, 67), backend), plain.feed(range(63, 67), backend))
    assert torch.equal(viewed.state, plain.state) and torch.equal(viewed.counts, plain.counts)


def test_an_empty_batch_decodes_to_nothing(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=0, T=1, device=device)
    assert Memory(inputs).feed(range(1), backend).shape == (0, 1, 2, 16)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"q": torch.zeros(1, 2, 1, 4), "k": torch.zeros(1, 2, 1, 4), "v": torch.zeros(1, 2, 1, 4)},
            "one position",
        ),
        ({"k_cache": torch.zeros(1, 63, 1, 4)}, "k_cache must be"),
        ({"v_cache": torch.zeros(1, 64, 1, 4, dtype=torch.float64)}, "type of q"),
        ({"state": torch.zeros(1, 1, 4, 4, dtype=torch.float64)}, "state must be"),
        ({"counts": torch.zeros(1, dtype=torch.int32)}, "int64"),
        ({"counts": torch.tensor([65])}, "0 to 64"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(change: dict, complaint: str) -> None:
    x, rows = torch.zeros(1, 1, 1, 4), torch.zeros(1, BLOCK, 1, 4)
    arguments = {
        "q": x, "k": x, "v": x, "log_decay": torch.zeros(1), "state": torch.zeros(1, 1, 4, 4),
        "k_cache": rows, "v_cache": rows.clone(), "counts": torch.zeros(1, dtype=torch.int64),
    }  # fmt: skip
    with pytest.raises(ValueError, match=complaint):
        lightning_decode(**arguments | change)
