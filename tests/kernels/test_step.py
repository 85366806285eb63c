"""Decode replays the open block: the row it gives is the forward's row, bit for bit, on each backend."""

import pytest
import torch
from minimax_kernels import BLOCK, lightning_attention, lightning_decode
from support import LightningInputs, lightning_inputs
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]


class Memory:
    """The cache of one layer in its simplest form; what was never written is NaN."""

    def __init__(self, inputs: LightningInputs, rows: int = BLOCK) -> None:
        B, _, H, Dk = inputs.q.shape
        Dv = inputs.v.shape[-1]
        self.log_decay = inputs.log_decay
        self.state = torch.zeros(B, H, Dk, Dv, device=inputs.q.device)
        self.k_rows = inputs.k.new_full((B, rows, H, Dk), float("nan"))
        self.v_rows = inputs.v.new_full((B, rows, H, Dv), float("nan"))
        self.counts = torch.zeros(B, dtype=torch.int64, device=inputs.q.device)

    def step(self, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        return lightning_decode(
            q, k, v, self.log_decay, state=self.state, k_rows=self.k_rows, v_rows=self.v_rows,
            counts=self.counts, backend=backend,
        )  # fmt: skip

    def feed(self, inputs: LightningInputs, rows: range, backend: str) -> Tensor:
        outs = [self.step(*(x[:, t : t + 1] for x in (inputs.q, inputs.k, inputs.v)), backend) for t in rows]
        return torch.cat(outs, dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [16, 64])
def test_decode_step_by_step_is_the_forward_bit_for_bit(
    backend: str, device: str, dtype: torch.dtype, D: int
) -> None:
    inputs = lightning_inputs(B=2, T=131, H=2, Dk=D, Dv=D, dtype=dtype, device=device)
    memory = Memory(inputs)
    stepped = memory.feed(inputs, range(131), backend)
    out, _ = lightning_attention(inputs.q, inputs.k, inputs.v, inputs.log_decay, backend=backend)
    boundary = (x[:, :128] for x in (inputs.q, inputs.k, inputs.v))
    _, state = lightning_attention(*boundary, inputs.log_decay, backend=backend)
    assert torch.equal(stepped, out)
    assert torch.equal(memory.state, state)
    assert memory.counts.tolist() == [3, 3]
    assert torch.equal(memory.k_rows[:, :3], inputs.k[:, 128:])


@pytest.mark.parametrize("widths", [(80, 48), (16, 128), (20, 12)], ids=str)
def test_uneven_widths_decode_like_the_forward(backend: str, device: str, widths: tuple[int, int]) -> None:
    inputs = lightning_inputs(B=1, T=67, H=1, Dk=widths[0], Dv=widths[1], device=device)
    stepped = Memory(inputs).feed(inputs, range(67), backend)
    out, _ = lightning_attention(inputs.q, inputs.k, inputs.v, inputs.log_decay, backend=backend)
    assert torch.equal(stepped, out)


def test_sequences_at_different_positions_are_stepped_together(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=4, T=130, device=device)
    together, held = Memory(inputs), [0, 63, 64, 129]
    for b, count in enumerate(held):
        one = LightningInputs(
            q=inputs.q[b : b + 1], k=inputs.k[b : b + 1], v=inputs.v[b : b + 1], log_decay=inputs.log_decay,
            state=None, cu_seqlens=None, dout=inputs.dout, dlast=inputs.dlast,
        )  # fmt: skip
        alone = Memory(one)
        if count:
            alone.feed(one, range(count), backend)
        for name in ("state", "k_rows", "v_rows", "counts"):
            getattr(together, name)[b] = getattr(alone, name)[0]
    row = torch.arange(4, device=device), torch.tensor(held, device=device)
    out = together.step(*(x[row][:, None] for x in (inputs.q, inputs.k, inputs.v)), backend)
    whole, _ = lightning_attention(inputs.q, inputs.k, inputs.v, inputs.log_decay, backend=backend)
    assert torch.equal(out[:, 0], whole[row])
    assert together.counts.tolist() == [1, 64, 1, 2]


def test_rows_of_the_last_call_can_be_taken_back(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=2, T=66, device=device)
    memory = Memory(inputs, rows=BLOCK + 3)
    first = memory.feed(inputs, range(64), backend)
    memory.counts -= 5
    again = memory.feed(inputs, range(59, 66), backend)
    out, _ = lightning_attention(inputs.q, inputs.k, inputs.v, inputs.log_decay, backend=backend)
    assert torch.equal(torch.cat([first[:, :59], again], dim=1), out)


def test_rows_and_state_may_be_views_of_a_larger_cache(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=2, T=70, device=device)
    plain, viewed = Memory(inputs), Memory(inputs)
    for name in ("state", "k_rows", "v_rows", "counts"):
        x = getattr(viewed, name)
        setattr(viewed, name, torch.stack([x, torch.full_like(x, 7)], dim=1)[:, 0])
    assert torch.equal(viewed.feed(inputs, range(70), backend), plain.feed(inputs, range(70), backend))
    assert torch.equal(viewed.state, plain.state) and torch.equal(viewed.counts, plain.counts)


def test_an_empty_batch_decodes_to_nothing(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=0, T=1, device=device)
    memory = Memory(inputs)
    assert memory.step(inputs.q, inputs.k, inputs.v, backend).shape == (0, 1, 2, 16)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"q": torch.zeros(1, 2, 1, 4), "k": torch.zeros(1, 2, 1, 4), "v": torch.zeros(1, 2, 1, 4)},
            "one position",
        ),
        ({"k_rows": torch.zeros(1, 63, 1, 4)}, "k_rows must be"),
        ({"v_rows": torch.zeros(1, 64, 1, 4, dtype=torch.float64)}, "type of q"),
        ({"state": torch.zeros(1, 1, 4, 4, dtype=torch.float64)}, "state must be"),
        ({"counts": torch.zeros(1, dtype=torch.int32)}, "int64"),
        ({"counts": torch.tensor([65])}, "0 to 64"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(change: dict, complaint: str) -> None:
    x, rows = torch.zeros(1, 1, 1, 4), torch.zeros(1, BLOCK, 1, 4)
    arguments = {
        "q": x, "k": x, "v": x, "log_decay": torch.zeros(1), "state": torch.zeros(1, 1, 4, 4),
        "k_rows": rows, "v_rows": rows.clone(), "counts": torch.zeros(1, dtype=torch.int64),
    }  # fmt: skip
    with pytest.raises(ValueError, match=complaint):
        lightning_decode(**arguments | change)
