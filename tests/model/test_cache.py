"""Claims about the cache: what it holds is the recurrence, whatever was done to it; what it cannot do it
refuses."""

import copy

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny import (
    KINDS,
    LIGHTNING,
    assert_close,
    assert_same_memory,
    cached_tensors,
    current_state_of,
    left_padded,
    model,
    pieces,
    prefilled,
    splits,
    tokens,
)
from torch import Tensor
from transformers import DynamicCache

from minimax_hybrid import HybridCache, MiniMaxM1ForCausalLM
from minimax_hybrid.lightning_attention import layer_log_decay
from minimax_kernels import BlockMemory, current_state, extend, fold, lightning_attention

NET = model()
BORDERS = [63, 64, 65, 128]


def logits(net: MiniMaxM1ForCausalLM, ids: Tensor, **inputs: object) -> Tensor:
    with torch.no_grad():
        return net(ids, **inputs).logits


def decode(cache: HybridCache, ids: Tensor) -> Tensor:
    """Logits (B, T, V) of ids (B, T), one call for each position."""
    return torch.cat([logits(NET, ids[:, t : t + 1], past_key_values=cache) for t in range(ids.shape[1])], 1)


# Splitting


@given(splits())
@example([17, 1, 19])
@example([36, 1])
@example([1, 36])
@example([16, 16, 5])
@example([37])
def test_any_split_is_the_whole(sizes: list[int]) -> None:
    ids = tokens(2, sum(sizes))
    found, cache = pieces(NET, ids, sizes)
    assert_close(found, logits(NET, ids, use_cache=False))
    assert_same_memory(cache, prefilled(NET, ids))


@given(splits(longest=140), st.lists(st.integers(0, 70), min_size=2, max_size=2), st.booleans())
def test_any_split_of_a_padded_batch_is_each_row_alone(
    sizes: list[int], pads: list[int], right: bool
) -> None:
    T = sum(sizes)
    pads = [min(pad, T - 1) for pad in pads]
    ids = tokens(2, T)
    place = torch.arange(T)
    real = torch.stack([place < T - pad if right else place >= pad for pad in pads])
    found, cache = pieces(NET, ids, sizes, real.long())
    for row in range(2):
        alone = ids[row, real[row]][None]
        assert_close(found[row, real[row]][None], logits(NET, alone, use_cache=False))
        fresh = prefilled(NET, alone)
        for i in LIGHTNING:
            state = current_state_of(cache, i)[row : row + 1]
            assert_close(state, current_state_of(fresh, i))


@pytest.mark.parametrize("max_rollback", [1, 64, 100, 1024])
def test_how_many_rows_are_kept_changes_no_logit(max_rollback: int) -> None:
    ids = tokens(2, 230)
    cache = prefilled(NET, ids[:, :200], max_rollback=max_rollback)
    found = logits(NET, ids[:, 200:], past_key_values=cache)
    assert_close(found, logits(NET, ids, use_cache=False)[:, 200:])


def test_decoding_token_by_token_over_block_borders_is_the_forward() -> None:
    ids = tokens(2, 135)
    cache = prefilled(NET, ids[:, :3])
    assert_close(decode(cache, ids[:, 3:]), logits(NET, ids, use_cache=False)[:, 3:])


@pytest.mark.parametrize("T", [1, 37, *BORDERS])
def test_the_current_state_is_the_recurrence(T: int) -> None:
    """The state of layer 0 after any history, against the definition over that layer's own k and v."""
    ids = tokens(2, T)
    _, cache = pieces(NET, ids, [T // 2, T - T // 2] if T > 1 else [T])
    attention = NET.model.layers[0].self_attn
    h = NET.model.layers[0].input_layernorm(NET.model.embed_tokens(ids))
    H, D = attention.num_heads, attention.head_dim
    q, k, v = attention.act(attention.qkv_proj(h)).view(2, T, H, 3 * D).split(D, dim=-1)
    decay = layer_log_decay(H, 0, len(KINDS), device=h.device)
    _, state = lightning_attention(*(x.double() for x in (q, k, v)), decay, backend="reference")
    assert_close(attention.current_state(cache).double(), state.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_rollback", [1, 70, 1024])
@pytest.mark.parametrize("sizes", [[100, 37, *[1] * 60], [1] * 130, [64, 64, 1, 63]], ids=len)
def test_lightning_attention_in_pieces_has_the_bits_of_one_call(
    sizes: list[int], max_rollback: int, dtype: torch.dtype
) -> None:
    """Blocks count from a sequence's own start: every row is computed by the same tile on the same values."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, sum(sizes), 3, 16, generator=make).to(dtype) for _ in range(3))
    decay = layer_log_decay(3, 0, 4, device=q.device)
    memory, outs = BlockMemory.empty(k, v), []
    for part in zip(*(x.split(sizes, dim=1) for x in (q, k, v)), strict=True):
        out, memory = extend(*part, decay, fold(memory, decay), token_mask=None, max_rollback=max_rollback)
        outs.append(out)
    found = torch.cat(outs, dim=1)
    whole, state = lightning_attention(q, k, v, decay)
    assert torch.equal(found, whole)
    assert torch.equal(current_state(memory, decay), state)


def test_lengths_are_right_though_layer_0_is_lightning() -> None:
    ids = tokens(2, 70)
    cache = HybridCache(NET.config)
    assert cache.get_seq_length() == 0
    assert current_state_of(cache, 0) is None
    decode(cache, ids[:, :1])
    logits(NET, ids[:, 1:69], past_key_values=cache)
    decode(cache, ids[:, 69:])
    assert [cache.get_seq_length(i) for i in range(len(KINDS))] == [70] * len(KINDS)
    assert cache.get_seq_length() == 70
    assert cache.batch_size == 2


# Choosing rows


def test_choosing_rows_reaches_every_tensor() -> None:
    prompts = tokens(4, 7)
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([3, 0, 0, 2])), [3, 0, 0, 2]),
        (lambda cache: cache.batch_repeat_interleave(3), [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
        (lambda cache: cache.batch_select_indices(torch.tensor([2])), [2]),
    ):
        cache = prefilled(NET, prompts)
        before = dict(cached_tensors(cache))
        change(cache)
        for name, value in cached_tensors(cache):
            assert torch.equal(value, before[name][rows]), name
        step = tokens(len(rows), 1, seed=1)
        found = logits(NET, step, past_key_values=cache)
        assert_close(found, logits(NET, step, past_key_values=prefilled(NET, prompts[rows])))


def test_repeating_then_choosing_reaches_the_padding_too() -> None:
    rows = list(tokens(4, 7).unbind(0))
    rows[1], rows[3] = rows[1][:4], rows[3][:1]
    ids, mask = left_padded(rows)
    cache = prefilled(NET, ids, mask)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 4]))
    step = tokens(2, 1, seed=1)
    found = logits(NET, step, past_key_values=cache)
    for row, kept in enumerate([0, 1]):
        alone = torch.cat([rows[kept], step[row]])[None]
        assert_close(found[row : row + 1], logits(NET, alone, use_cache=False)[:, -1:])


def test_choosing_rows_midway_through_a_block_lets_decoding_go_on() -> None:
    ids = tokens(3, 70)
    cache = prefilled(NET, ids[:, :60])
    decode(cache, ids[:, 60:62])
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    ids = ids[[2, 2, 0]]
    assert_close(decode(cache, ids[:, 62:]), logits(NET, ids, use_cache=False)[:, 62:])


def test_an_empty_cache_can_be_reordered() -> None:
    cache = HybridCache(NET.config)
    cache.reorder_cache(torch.tensor([0, 0]))
    cache.batch_repeat_interleave(2)
    assert cache.get_seq_length() == 0


def test_a_copied_cache_and_its_original_go_separate_ways() -> None:
    ids, other = tokens(1, 40), tokens(1, 40, seed=5)
    cache = prefilled(NET, ids[:, :30])
    decode(cache, ids[:, 30:33])
    twin = copy.deepcopy(cache)
    decode(twin, other[:, 33:])
    assert_close(decode(cache, ids[:, 33:]), logits(NET, ids, use_cache=False)[:, 33:])


def test_a_reset_cache_is_a_new_one() -> None:
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 5)[0]])
    cache = prefilled(NET, ids, mask)
    cache.reset()
    assert cache.get_seq_length() == 0
    step = tokens(3, 12, seed=2)
    assert torch.equal(logits(NET, step, past_key_values=cache), logits(NET, step, use_cache=False))


# Taking back


def check_crop(cache: HybridCache, ids: Tensor, T: int, mask: Tensor | None = None) -> None:
    """After a crop to T positions: memory and next logits are those of a cache that never went further."""
    mask = None if mask is None else mask[:, :T]
    fresh = prefilled(NET, ids[:, :T], mask) if T else HybridCache(NET.config)
    assert cache.get_seq_length() == T
    if T:
        assert_same_memory(cache, fresh)
    step = tokens(len(ids), 3, seed=9)
    assert_close(logits(NET, step, past_key_values=cache), logits(NET, step, past_key_values=fresh))


@pytest.mark.parametrize("amount", [-5, 15, torch.tensor(-5)], ids=["count", "length", "tensor"])
def test_a_crop_is_exact_however_it_is_asked_for(amount: int | Tensor) -> None:
    ids = tokens(2, 20)
    cache = prefilled(NET, ids)
    cache.crop(amount)
    check_crop(cache, ids, 15)


@given(splits(longest=150), st.data())
def test_a_crop_within_the_last_call_is_exact(sizes: list[int], data: st.DataObject) -> None:
    ids = tokens(1, sum(sizes))
    _, cache = pieces(NET, ids, sizes)
    remove = data.draw(st.integers(0, sizes[-1]))
    cache.crop(-remove)
    check_crop(cache, ids, sum(sizes) - remove)


@pytest.mark.parametrize("T", BORDERS)
def test_the_last_decoded_token_can_be_taken_back_at_a_block_border(T: int) -> None:
    ids = tokens(2, T)
    cache = prefilled(NET, ids[:, : T - 3])
    decode(cache, ids[:, T - 3 :])
    cache.crop(-1)
    check_crop(cache, ids, T - 1)


@pytest.mark.parametrize("T", BORDERS)
def test_decoded_tokens_are_taken_back_or_the_crop_is_refused(T: int) -> None:
    """Over a block border the rows are gone: nothing may change then, not even what another layer holds."""
    ids = tokens(1, T + 1)
    cache = prefilled(NET, ids[:, : T - 9])
    decode(cache, ids[:, T - 9 : T])
    before = {name: value.clone() for name, value in cached_tensors(cache)}
    try:
        cache.crop(-9)
    except ValueError as error:
        assert "folded into its state" in str(error)
        assert cache.get_seq_length() == T
        for name, value in cached_tensors(cache):
            assert torch.equal(value, before[name]), name
        found = logits(NET, ids[:, T:], past_key_values=cache)
        assert_close(found, logits(NET, ids, use_cache=False)[:, T:])
    else:
        check_crop(cache, ids, T - 9)


def test_rows_of_several_calls_stay_while_the_past_is_recorded() -> None:
    """A drafting model takes back tokens that it decoded one by one, wherever blocks end."""
    ids = tokens(1, 80)
    cache = prefilled(NET, ids[:, :60])
    cache.activate_past_recording()
    cache.crop(0)
    decode(cache, ids[:, 60:])
    cache.crop(-19)
    check_crop(cache, ids, 61)


def test_a_crop_of_a_padded_call_is_exact() -> None:
    rows = [tokens(1, 11)[0], tokens(1, 8, seed=3)[0]]
    ids, mask = left_padded(rows)
    for remove in (2, 8, 9):  # the last one reaches into the padding of the second row
        cache = prefilled(NET, ids, mask)
        cache.crop(-remove)
        check_crop(cache, ids, 11 - remove, mask)


@pytest.mark.parametrize("remove", [3, 4, 7, 12])
def test_a_crop_across_calls_with_padding_is_exact(remove: int) -> None:
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 6:8] = 0
    _, cache = pieces(NET, ids, [5, 4, 3], mask)
    cache.crop(-remove)
    check_crop(cache, ids, 12 - remove, mask)


def test_a_crop_beyond_the_rows_kept_is_refused_and_changes_nothing() -> None:
    ids = tokens(2, 200)
    cache = prefilled(NET, ids[:, :199], max_rollback=16)
    with pytest.raises(ValueError, match="max_rollback"):
        cache.crop(-150)
    cache.crop(0)
    found = logits(NET, ids[:, 199:], past_key_values=cache)
    fresh = prefilled(NET, ids[:, :199], max_rollback=16)
    assert torch.equal(found, logits(NET, ids[:, 199:], past_key_values=fresh))
    with pytest.raises(ValueError, match="the cache holds 200"):
        cache.crop(-201)


def test_at_least_the_rows_kept_can_be_taken_back() -> None:
    ids = tokens(1, 300)
    cache = prefilled(NET, ids, max_rollback=100)
    cache.crop(-100)
    check_crop(cache, ids, 200)


def test_a_crop_to_nothing_leaves_an_empty_cache() -> None:
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 5)[0]])
    cache = prefilled(NET, ids, mask)
    cache.crop(-9)
    check_crop(cache, ids, 0)


def test_a_length_beyond_what_is_held_takes_nothing_back() -> None:
    cache = prefilled(NET, tokens(1, 9))
    cache.crop(12)
    assert cache.get_seq_length() == 9


# Refusals


def test_a_cache_answers_to_both_names() -> None:
    ids = tokens(1, 9)
    out = NET(ids[:, :8], cache=HybridCache(NET.config))
    assert out.cache is out.past_key_values
    base = NET.model(ids[:, :8], past_key_values=HybridCache(NET.config))
    assert base.cache is base.past_key_values
    first = logits(NET, ids[:, 8:], past_key_values=out.cache)
    assert torch.equal(first, logits(NET, ids[:, 8:], cache=base.cache))
    with pytest.raises(ValueError, match="two names of one argument"):
        NET(ids, cache=HybridCache(NET.config), past_key_values=HybridCache(NET.config))


def test_a_given_cache_is_continued_even_with_use_cache_false() -> None:
    ids = tokens(1, 9)
    cache = prefilled(NET, ids[:, :8])
    found = logits(NET, ids[:, 8:], past_key_values=cache, use_cache=False)
    assert_close(found, logits(NET, ids, use_cache=False)[:, 8:])


def test_another_kind_of_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="DynamicCache, and lightning layers need a HybridCache"):
        NET(tokens(1, 3), past_key_values=DynamicCache())


def unchanged(cache: HybridCache, ids: Tensor, message: str, **inputs: object) -> None:
    """The call is refused in these words, and the cache goes on as if it had not been made."""
    twin = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=message):
        logits(NET, ids, past_key_values=cache, **inputs)
    step, after = tokens(cache.batch_size, 1, seed=4), copy.deepcopy(cache)
    assert torch.equal(logits(NET, step, past_key_values=after), logits(NET, step, past_key_values=twin))


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    ids, step = tokens(2, 8), tokens(2, 2, seed=1)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    plain = prefilled(NET, ids)
    unchanged(plain, tokens(3, 1), "the cache holds 2 sequences, got 3")
    unchanged(plain, step, "hides other cached positions", attention_mask=mask)
    padded = prefilled(NET, ids, mask[:, :8])
    unchanged(padded, step, "hides other cached positions", attention_mask=torch.ones(2, 10))
    unchanged(padded, step, "8 cached and 2 new positions", attention_mask=torch.ones(2, 2))
    unchanged(padded, step, "other patterns", attention_mask=torch.ones(2, 1, 2, 10))
    unchanged(plain, step, "packed documents", position_ids=torch.tensor([[8, 0]]))
    unchanged(plain, step, "position_ids must be", position_ids=torch.arange(3)[None])
    unchanged(plain, torch.full((2, 1), 99), "token id 99 is not in the vocabulary")


def test_a_call_that_broke_off_midway_closes_the_cache() -> None:
    """Some layers have seen its tokens and others have not: going on would be silently wrong."""
    ids = tokens(1, 9)
    cache = prefilled(NET, ids[:, :8])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = NET.model.layers[2].block_sparse_moe.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            logits(NET, ids[:, 8:], past_key_values=cache)
    finally:
        handle.remove()
    assert len({layer.get_seq_length() for layer in cache.layers}) == 2
    for use in (lambda: logits(NET, ids[:, 8:], past_key_values=cache), lambda: cache.crop(-1)):
        with pytest.raises(ValueError, match="broke off midway"):
            use()
    cache.reset()
    assert torch.equal(logits(NET, ids, past_key_values=cache), logits(NET, ids, use_cache=False))


def test_a_lightning_layer_is_no_store_of_keys() -> None:
    layer = HybridCache(NET.config).layers[0]
    for use in (layer.update, layer.lazy_initialization):
        with pytest.raises(TypeError):
            use(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    with pytest.raises(ValueError, match="max_rollback is 0"):
        HybridCache(NET.config, max_rollback=0)


# Gradients and modes


@pytest.mark.parametrize("kinds", [[0, 1, 0, 0], [1, 0, 0, 1]], ids=str)
def test_gradients_flow_through_cached_positions(kinds: list[int]) -> None:
    """A trained prefix in front of frozen weights: its gradient passes through keys, states and open rows."""
    net = model(attn_type_list=kinds).double().requires_grad_(False)
    embedded = net.model.embed_tokens(tokens(1, 70))
    weight = torch.randn(70, 32, generator=torch.Generator().manual_seed(1))
    grads = []
    for sizes in ([70], [66, 1, 3], [3, 1, 66], [69, 1]):
        prefix = embedded.clone().requires_grad_()
        cache, hidden, first = HybridCache(net.config), [], 0
        for size in sizes:
            piece = prefix[:, first : first + size] if first == 0 else embedded[:, first : first + size]
            hidden.append(net.model(inputs_embeds=piece, past_key_values=cache).last_hidden_state)
            first += size
        out = torch.cat(hidden, dim=1)[0]
        grads.append(torch.autograd.grad((out * weight).sum(), prefix)[0][:, : min(3, sizes[0])])
    for grad in grads[1:]:
        assert_close(grad, grads[0], 1e-9)


def test_a_cache_filled_in_inference_mode_serves_afterwards() -> None:
    ids = tokens(1, 75)
    cache = HybridCache(NET.config)
    with torch.inference_mode():
        NET(ids[:, :62], past_key_values=cache)
        NET(ids[:, 62:63], past_key_values=cache)
    found = decode(cache, ids[:, 63:])
    assert_close(found, logits(NET, ids, use_cache=False)[:, 63:])


def test_a_cache_filled_under_autocast_serves_without_it() -> None:
    ids = tokens(1, 75)
    cache = HybridCache(NET.config)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        NET(ids[:, :62], past_key_values=cache)
    assert_close(decode(cache, ids[:, 62:]), logits(NET, ids, use_cache=False)[:, 62:], 0.1)
    assert cache.layers[0].stored.k_cache.dtype == cache.layers[1].keys.dtype == torch.float32


def test_inference_mode_first_does_not_spoil_training() -> None:
    net = model(num_attention_heads=5)  # a size that no other test has: its constants are made here
    with torch.inference_mode():
        net(tokens(1, 70))
    loss = net(tokens(1, 70), labels=tokens(1, 70)).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_a_cache_that_grows_writes_over_nobody() -> None:
    """Rows handed out earlier stay as they were while the cache grows, is taken back and grows again."""
    ids = tokens(2, 30)
    cache = prefilled(NET, ids[:, :10])
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(torch.tensor([1]))
    kept = chosen.layers[1].keys.clone()
    decode(cache, ids[:, 10:])
    assert torch.equal(chosen.layers[1].keys, kept)
    assert_close(decode(chosen, ids[1:, 10:12]), logits(NET, ids[1:, :12], use_cache=False)[:, 10:])
