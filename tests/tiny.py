"""Small random models for all tests, their tokenizers, and what the tests of the model compare.

`config` and `model` are the usual ones; `many_experts`, `checkpoint` and `letters` differ from them in what
their tests need: names that sort wrongly, texts, and a task that training solves within seconds.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from minimax_hybrid import HybridCache, MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.lightning_attention import layer_log_decay
from minimax_kernels import current_state

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
# Twelve experts, so that expert 10 would come before expert 2 if names were sorted.
MANY_EXPERTS = dict(
    num_hidden_layers=3, attn_type_list=[0, 1, 0], num_local_experts=12, hidden_size=32, intermediate_size=16,
    head_dim=16, rotary_dim=8, vocab_size=61,
)  # fmt: skip
CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz .:\n"
STRING_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEXTS = dict(hidden_size=32, num_hidden_layers=2, attn_type_list=[0, 1])
LETTERS = ["<pad>", "<end>", "a", "b", "c", "d", "e", "f"]
TOLERANCE = 1e-5  # of values of about 1, in float32


def config(**changes: object) -> MiniMaxM1Config:
    return MiniMaxM1Config.tiny(**{**SIZES, **changes})


def model(*, seed: int = 0, **changes: object) -> MiniMaxM1ForCausalLM:
    """In evaluation mode; the same seed and changes give the same bits."""
    torch.manual_seed(seed)
    return MiniMaxM1ForCausalLM(config(**changes)).eval()


def many_experts_config(**changes: object) -> MiniMaxM1Config:
    return MiniMaxM1Config.tiny(**{**MANY_EXPERTS, **changes})


def many_experts(
    *, cls: type[nn.Module] = MiniMaxM1ForCausalLM, seed: int = 0, **changes: object
) -> nn.Module:
    """Every parameter is random, norms too, so that a mistake shows."""
    torch.manual_seed(seed)
    net = cls(many_experts_config(**changes))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    return net.eval()


def character_tokenizer(*, ends: bool = True) -> PreTrainedTokenizerFast:
    """One token for each character and, if texts are to end, one for that; other characters have none."""
    vocabulary = {c: i for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    if ends:
        tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"eos_token": "<end>"} if ends else {}))
    fast.chat_template = STRING_TEMPLATE
    return fast


def checkpoint(folder: Path, *, seed: int = 0, ends: bool = True, **changes: object) -> Path:
    """A random two-layer model and its tokenizer in `folder`."""
    tokenizer = character_tokenizer(ends=ends)
    words = dict(vocab_size=len(tokenizer), initializer_range=0.15, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(seed)
    net = MiniMaxM1ForCausalLM(MiniMaxM1Config.tiny(**{**TEXTS, **words, **changes}))
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def letters_tokenizer() -> PreTrainedTokenizerFast:
    word_level = models.WordLevel({token: i for i, token in enumerate(LETTERS)}, unk_token="f")
    raw = Tokenizer(word_level)
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>")


def letters(layers: int = 2, seed: int = 0) -> MiniMaxM1ForCausalLM:
    """Its last layer is softmax attention, the others lightning; in training mode."""
    sizes = dict(
        num_hidden_layers=layers, attn_type_list=[0] * (layers - 1) + [1], num_attention_heads=2,
        num_key_value_heads=1, hidden_size=32, head_dim=16, rotary_dim=8, vocab_size=len(LETTERS),
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    return MiniMaxM1ForCausalLM(MiniMaxM1Config.tiny(**sizes))


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


def current_state_of(cache: HybridCache, i: int) -> Tensor | None:
    """The state of lightning layer i after the last cached position."""
    memory = cache.layers[i].stored
    if memory is None:
        return None
    H, L = memory.state.shape[1], len(cache.layers)
    return current_state(memory, layer_log_decay(H, i, L, device=memory.state.device))


def cached_tensors(cache: HybridCache) -> Iterator[tuple[str, Tensor]]:
    """Everything a cache remembers: keys, values, states and the mask, by name."""
    for i, layer in enumerate(cache.layers):
        if KINDS[i]:
            yield f"{i}.keys", layer.keys
            yield f"{i}.values", layer.values
        else:
            yield f"{i}.state", current_state_of(cache, i)
    if cache.token_mask is not None:
        yield "token_mask", cache.token_mask.float()


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
