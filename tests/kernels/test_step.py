"""Decode replays the open block: the row it gives is the forward's row, bit for bit, on each backend."""

import pytest
import torch
from support import LightningInputs, lightning_inputs
from torch import Tensor

from minimax_kernels import BLOCK, BlockMemory, lightning_attention, lightning_decode

DTYPES = [torch.float32, torch.bfloat16]


class Decoder:
    """Steps one layer's memory; what was never written is NaN."""

    def __init__(self, inputs: LightningInputs, *, room: int = BLOCK) -> None:
        B, _, H, Dk = inputs.q.shape
        Dv = inputs.v.shape[-1]
        self.inputs = inputs
        self.memory = BlockMemory(
            torch.zeros(B, H, Dk, Dv, device=inputs.q.device),
            inputs.k.new_full((B, room, H, Dk), float("nan")),
            inputs.v.new_full((B, room, H, Dv), float("nan")),
            torch.zeros(B, dtype=torch.int64, device=inputs.q.device),
        )

    def prefill(self, b: int, positions: int, backend: str) -> None:
        """Sequence b after its first `positions` tokens; a block that is just full is not yet folded."""
        boundary = max(0, positions - 1) // BLOCK * BLOCK
        state, k_cache, v_cache, seqlens = self.memory
        state[b] = forward(self.inputs, slice(0, boundary), backend)[1][b]
        seqlens[b] = positions - boundary
        k_cache[b, : positions - boundary] = self.inputs.k[b, boundary:positions]
        v_cache[b, : positions - boundary] = self.inputs.v[b, boundary:positions]

    def step(self, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        return lightning_decode(q, k, v, self.inputs.log_decay, self.memory, backend=backend)

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
    decoder = Decoder(inputs)
    stepped = decoder.feed(range(131), backend)
    assert torch.equal(stepped, forward(inputs, slice(None), backend)[0])
    assert torch.equal(decoder.memory.state, forward(inputs, slice(0, 128), backend)[1])
    assert decoder.memory.cache_seqlens.tolist() == [3]
    assert torch.equal(decoder.memory.k_cache[:, :3], inputs.k[:, 128:])
    assert torch.equal(decoder.memory.v_cache[:, :3], inputs.v[:, 128:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (80, 48), (16, 128), (20, 12)], ids=str)
def test_decode_after_prefill_is_the_forward_bit_for_bit(
    backend: str, device: str, dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    inputs = lightning_inputs(B=2, T=66, Dk=widths[0], Dv=widths[1], dtype=dtype, device=device)
    decoder = Decoder(inputs)
    for b in range(2):
        decoder.prefill(b, 62, backend)
    stepped = decoder.feed(range(62, 66), backend)
    assert torch.equal(stepped, forward(inputs, slice(None), backend)[0][:, 62:])


def test_sequences_at_different_positions_are_stepped_together(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=5, T=130, H=1, device=device)
    decoder, held = Decoder(inputs), [0, 1, 63, 64, 129]
    for b, positions in enumerate(held):
        decoder.prefill(b, positions, backend)
    row = torch.arange(5, device=device), torch.tensor(held, device=device)
    out = decoder.step(*(x[row][:, None] for x in (inputs.q, inputs.k, inputs.v)), backend)
    assert torch.equal(out[:, 0], forward(inputs, slice(None), backend)[0][row])
    assert decoder.memory.cache_seqlens.tolist() == [1, 2, 64, 1, 2]


def test_rows_of_the_last_call_can_be_taken_back(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=2, T=66, H=1, device=device)
    decoder = Decoder(inputs, room=BLOCK + 3)
    for b in range(2):
        decoder.prefill(b, 64, backend)
    decoder.memory.cache_seqlens.sub_(3)
    again = decoder.feed(range(61, 66), backend)
    assert torch.equal(again, forward(inputs, slice(None), backend)[0][:, 61:])


def test_rows_and_state_may_be_views_of_a_larger_cache(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=2, T=67, H=1, device=device)
    plain, viewed = Decoder(inputs), Decoder(inputs)
    viewed.memory = viewed.memory.map(lambda x: torch.stack([x, torch.full_like(x, 7)], dim=1)[:, 0])
    for decoder in (plain, viewed):
        for b in range(2):
            decoder.prefill(b, 63, backend)
    assert torch.equal(viewed.feed(range(63, 67), backend), plain.feed(range(63, 67), backend))
    assert torch.equal(viewed.memory.state, plain.memory.state)
    assert torch.equal(viewed.memory.cache_seqlens, plain.memory.cache_seqlens)


def test_an_empty_batch_decodes_to_nothing(backend: str, device: str) -> None:
    inputs = lightning_inputs(B=0, T=1, device=device)
    assert Decoder(inputs).feed(range(1), backend).shape == (0, 1, 2, 16)


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
        ({"cache_seqlens": torch.zeros(1, dtype=torch.int32)}, "int64"),
        ({"cache_seqlens": torch.tensor([65])}, "0 to 64"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(change: dict, complaint: str) -> None:
    x, cache = torch.zeros(1, 1, 1, 4), torch.zeros(1, BLOCK, 1, 4)
    memory = BlockMemory(torch.zeros(1, 1, 4, 4), cache, cache.clone(), torch.zeros(1, dtype=torch.int64))
    memory = memory._replace(**{name: value for name, value in change.items() if name in memory._fields})
    inputs = {"q": x, "k": x, "v": x, **{name: value for name, value in change.items() if name in "qkv"}}
    with pytest.raises(ValueError, match=complaint):
        lightning_decode(**inputs, log_decay=torch.zeros(1), memory=memory)
