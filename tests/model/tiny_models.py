"""Small random models whose logits react to every token, and what the tests of the model compare."""

from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch import Tensor

from minimax_hybrid import HybridCache, MiniMaxM1Config, MiniMaxM1ForCausalLM

V = 32
KINDS = [0, 1, 0, 0]  # a lightning layer first: nothing may rely on the length of layer 0's keys
LIGHTNING = [i for i, kind in enumerate(KINDS) if kind == 0]
SIZES = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=len(KINDS),
    attn_type_list=KINDS,
    num_attention_heads=3,  # no power of two, and heads * head_dim is not hidden_size
    num_key_value_heads=1,
    head_dim=16,
    rotary_dim=8,
    initializer_range=0.15,
)
TOLERANCE = 1e-5  # of values of about 1, in float32


def config(**changes: object) -> MiniMaxM1Config:
    return MiniMaxM1Config.tiny(**{**SIZES, **changes})


def model(*, seed: int = 0, **changes: object) -> MiniMaxM1ForCausalLM:
    """In evaluation mode; the same seed and changes give the same bits."""
    torch.manual_seed(seed)
    return MiniMaxM1ForCausalLM(config(**changes)).eval()


def tokens(B: int, T: int, *, seed: int = 0, low: int = 1) -> Tensor:
    """(B, T) random token ids from `low` on, so that 0 can serve as padding."""
    return torch.randint(low, V, (B, T), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Rows (T_b,) as (B, T) ids and mask."""
    T = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_full((T - len(row),), pad), row]) for row in rows])
    mask = torch.stack([torch.arange(T) >= T - len(row) for row in rows]).long()
    return ids, mask


def difference(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, in units of max(1, |value|)."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} and {tuple(wanted.shape)}"
    if not wanted.numel():
        return 0.0
    return ((found - wanted).abs() / wanted.abs().clamp(min=1)).max().item()


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    off = difference(found, wanted)
    assert off <= tolerance, f"off by {off:.3g}, allowed are {tolerance:.3g}"


def cached_tensors(cache: HybridCache) -> Iterator[tuple[str, Tensor]]:
    """Everything a cache remembers: keys, values, states and the mask, by name."""
    for i, layer in enumerate(cache.layers):
        if KINDS[i]:
            yield f"{i}.keys", layer.keys
            yield f"{i}.values", layer.values
        else:
            yield f"{i}.state", layer.current_state()
    if cache.history is not None:
        yield "history", cache.history.float()


def assert_same_memory(found: HybridCache, wanted: HybridCache, tolerance: float = TOLERANCE) -> None:
    expected = dict(cached_tensors(wanted))
    assert dict(cached_tensors(found)).keys() == expected.keys()
    for name, value in cached_tensors(found):
        off = difference(value, expected[name])
        assert off <= tolerance, f"{name} is off by {off:.3g}, allowed are {tolerance:.3g}"


@torch.no_grad()
def prefilled(
    net: MiniMaxM1ForCausalLM, ids: Tensor, mask: Tensor | None = None, *, max_rollback: int = 1024
) -> HybridCache:
    cache = HybridCache(net.config, max_rollback=max_rollback)
    net(ids, attention_mask=mask, past_key_values=cache)
    return cache


@torch.no_grad()
def pieces(
    net: MiniMaxM1ForCausalLM, ids: Tensor, sizes: list[int], mask: Tensor | None = None
) -> tuple[Tensor, HybridCache]:
    """Logits of all positions, computed piece by piece with a cache, and that cache."""
    cache, logits, first = HybridCache(net.config), [], 0
    for size in sizes:
        end = first + size
        grown = None if mask is None else mask[:, :end]
        logits.append(net(ids[:, first:end], attention_mask=grown, past_key_values=cache).logits)
        first = end
    return torch.cat(logits, dim=1), cache


@st.composite
def splits(draw: st.DrawFn, longest: int = 200) -> list[int]:
    """Sizes of pieces; borders lie anywhere, and often at a block of 64."""
    T = draw(st.integers(1, longest))
    near_blocks = [border + step for border in (64, 128, 192) for step in (-1, 0, 1)]
    border = st.integers(0, T) | st.sampled_from([b for b in near_blocks if b < T] or [0])
    borders = sorted(draw(st.lists(border, max_size=5)))
    return [b - a for a, b in zip([0, *borders], [*borders, T], strict=True) if b > a]
