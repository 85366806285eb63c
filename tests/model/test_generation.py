"""Claims about generation: every way of generating gives the plain one's tokens, and says why it ended."""

import math
import threading
import warnings

import pytest
import torch
from tiny import V, difference, left_padded, model, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from minimax_hybrid import (
    HybridCache,
    MiniMaxM1ForCausalLM,
    RepetitionStop,
    finish_reasons,
)
from minimax_hybrid.compat import CACHE_NAME

NET = model()
GREEDY = dict(do_sample=False, pad_token_id=0, eos_token_id=None)


def generate(net: MiniMaxM1ForCausalLM, ids: Tensor, N: int = 12, **options: object) -> Tensor:
    """The N new tokens (B, N)."""
    return net.generate(ids, **{**GREEDY, "max_new_tokens": N, **options})[:, ids.shape[1] :]


# The cache changes nothing


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.8, "top_p": 0.95},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.5},
        {"num_beams": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("T", [5, 60])
def test_the_cache_changes_no_token(options: dict, T: int) -> None:
    ids = tokens(2, T)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        found.append(generate(NET, ids, 8, use_cache=use_cache, **options))
    assert torch.equal(*found)
    assert len(found[0].unique()) > 3


def test_prompts_of_different_length_generate_as_each_alone() -> None:
    rows = [tokens(1, n, seed=n)[0] for n in (3, 61, 17)]
    ids, mask = left_padded(rows)
    for options in ({}, {"num_beams": 3}):
        found = generate(NET, ids, attention_mask=mask, **options)
        for b, row in enumerate(rows):
            assert torch.equal(found[b], generate(NET, row[None], **options)[0])


def test_a_padding_token_in_the_prompt_needs_no_mask() -> None:
    """transformers takes the padding token for padding where it can; a mask says otherwise."""
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 5)[0]])
    assert torch.equal(
        generate(NET, ids, eos_token_id=V - 1), generate(NET, ids, attention_mask=mask, eos_token_id=V - 1)
    )


def test_generation_continues_from_an_earlier_cache() -> None:
    ids = tokens(1, 20)
    first = NET.generate(ids, max_new_tokens=45, return_dict_in_generate=True, **GREEDY)
    cache = first[CACHE_NAME]
    assert isinstance(cache, HybridCache) and cache.get_seq_length() == 64
    more = torch.cat([first.sequences, tokens(1, 3, seed=1)], dim=1)
    for name in ("cache", "past_key_values"):
        continued = cache if name == "cache" else model_cache(more[:, :-3])
        mask = torch.ones_like(more)  # or transformers would hide the padding tokens that were generated
        found = generate(NET, more, attention_mask=mask, **{name: continued})
        assert torch.equal(found, generate(NET, more, attention_mask=mask, use_cache=False))


def model_cache(ids: Tensor) -> HybridCache:
    cache = HybridCache(NET.config)
    with torch.no_grad():
        NET(ids, past_key_values=cache)
    return cache


def test_embeddings_can_stand_for_the_prompt() -> None:
    ids = tokens(2, 20)
    found = NET.generate(inputs_embeds=NET.model.embed_tokens(ids), max_new_tokens=12, **GREEDY)
    assert torch.equal(found[:, -12:], generate(NET, ids))


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_sees_every_token() -> None:
    ids, streamer = tokens(1, 9), Collect()
    thread = threading.Thread(
        target=NET.generate, args=(ids,), kwargs={**GREEDY, "max_new_tokens": 12, "streamer": streamer}
    )
    thread.start()
    thread.join()
    assert streamer.ended
    assert streamer.seen == [*ids[0].tolist(), *generate(NET, ids)[0].tolist()]


def test_the_auto_class_generates(tmp_path) -> None:
    NET.save_pretrained(tmp_path)
    ids = tokens(1, 9)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, MiniMaxM1ForCausalLM)
    assert torch.equal(generate(loaded, ids), generate(NET, ids))


def test_another_cache_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="generates with its own HybridCache"):
        generate(NET, tokens(1, 3), cache_implementation="static")


# Calls leave nothing behind


def test_calls_do_not_disturb_each_other() -> None:
    """A then B, B then A, steps of both in turn, B after A broke off: each has the bits of a fresh model."""
    a, b = tokens(1, 9, seed=1), tokens(2, 66, seed=2)
    fresh_a, fresh_b = (generate(model(), ids) for ids in (a, b))
    net = model()
    buffers = {name: value.clone() for name, value in net.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in net.named_modules()}
    for ids, wanted in ((a, fresh_a), (b, fresh_b), (a, fresh_a)):
        assert torch.equal(generate(net, ids), wanted)

    class Abort(Collect):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.seen) > 12:
                raise RuntimeError("the reader went away")

    with pytest.raises(RuntimeError, match="went away"):
        generate(net, a, streamer=Abort())
    assert torch.equal(generate(net, b), fresh_b)

    def steps(net: MiniMaxM1ForCausalLM, ids: Tensor, cache: HybridCache, t: int) -> Tensor:
        with torch.no_grad():
            return net(ids[:, t : t + 1], past_key_values=cache).logits

    caches = [HybridCache(net.config) for _ in range(2)]
    mixed = [[steps(net, ids, cache, t) for ids, cache in zip((a, b), caches, strict=True)] for t in range(9)]
    for which, ids in enumerate((a, b)):
        alone, cache = model(), HybridCache(net.config)
        for t in range(9):
            assert torch.equal(steps(alone, ids, cache, t), mixed[t][which])
    assert torch.equal(net(a).logits, net(a).logits)
    assert net.state_dict().keys() == buffers.keys()
    assert all(torch.equal(value, buffers[name]) for name, value in net.state_dict().items())
    assert {name: dict(vars(module)).keys() for name, module in net.named_modules()} == {
        name: values.keys() for name, values in attributes.items()
    }
    assert not list(net.buffers())


# Drafts


def assistant(kind: str) -> torch.nn.Module:
    if kind == "llama":
        torch.manual_seed(1)
        settings = LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        return LlamaForCausalLM(settings).eval()
    return model(seed=0 if kind == "itself" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["itself", "hybrid", "llama"])
@pytest.mark.parametrize("drafts", [1, 5, 20])
def test_assisted_decoding_gives_the_greedy_tokens(kind: str, drafts: int) -> None:
    ids, helper = tokens(1, 50, low=0), assistant(kind)
    helper.generation_config.num_assistant_tokens = drafts
    helper.generation_config.assistant_confidence_threshold = 0.0
    wanted = generate(NET, ids, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(generate(NET, ids, 40, assistant_model=helper), wanted)


@pytest.mark.parametrize("drafts", [2, 10])
def test_prompt_lookup_gives_the_greedy_tokens(drafts: int) -> None:
    ids = tokens(1, 25, low=0).repeat(1, 2)
    found = generate(NET, ids, 80, prompt_lookup_num_tokens=drafts)
    assert torch.equal(found, generate(NET, ids, 80))


def test_drafts_take_prompts_with_padding() -> None:
    ids, mask = left_padded([torch.zeros(30, dtype=torch.long), tokens(1, 20).repeat(1, 2)[0]])
    ids, mask = ids[1:], mask[1:]
    ids[0, :7], mask[0, :7] = 0, 0
    found = generate(NET, ids, 40, attention_mask=mask, prompt_lookup_num_tokens=4)
    assert torch.equal(found, generate(NET, ids, 40, attention_mask=mask))


def test_drafts_that_could_not_be_taken_back_are_refused_before_the_first_token() -> None:
    ids, streamer = tokens(1, 9), Collect()
    helper = assistant("hybrid")
    helper.generation_config.num_assistant_tokens = 2000
    refused = (
        ({"prompt_lookup_num_tokens": 2000}, "prompt_lookup_num_tokens is 2000"),
        ({"assistant_model": helper}, "num_assistant_tokens is 2000"),
        ({"assistant_early_exit": 2}, "assistant_early_exit drafts with the first layers"),
        (
            {"prompt_lookup_num_tokens": 10, "past_key_values": HybridCache(NET.config, max_rollback=8)},
            "at most 8 tokens",
        ),
    )
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            generate(NET, ids, streamer=streamer, **options)
    assert not streamer.seen


# The repetition stop


def run(stop: RepetitionStop, probabilities: list[float]) -> int | None:
    """After how many tokens of these probabilities the stop ends a sequence; None if it doesn't."""
    for n, p in enumerate(probabilities, start=1):
        if bool(stop.count(torch.tensor([p]))):
            return n
    return None


def test_three_thousand_confident_tokens_end_a_sequence() -> None:
    assert run(RepetitionStop(), [0.995] * 3000) == 3000
    assert run(RepetitionStop(), [0.995] * 2999 + [0.5] + [0.995] * 2999) is None
    assert run(RepetitionStop(), [0.99] * 3000) is None
    assert run(RepetitionStop(run=5, threshold=0.4), [0.5] * 9) == 5
    assert run(RepetitionStop(run=1, threshold=0.4), [0.3, 0.5]) == 2


@pytest.mark.parametrize("options", [{"run": 0}, {"threshold": 0.0}, {"threshold": 1.0}], ids=str)
def test_a_stop_that_means_nothing_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        RepetitionStop(**options)


def test_the_probability_is_that_of_the_token_chosen() -> None:
    """Row 0 takes its likeliest token, row 1 an unlikely one, as sampling may."""
    stop = RepetitionStop(run=2, threshold=0.9)
    logits = torch.tensor([[math.log(0.95), math.log(0.05)]] * 2)
    for _ in range(2):
        stop.watch(logits)
        stopped = stop(torch.tensor([[5, 0], [5, 1]]), None)
    assert stopped.tolist() == [True, False]
    assert stop.stopped_after.tolist() == [2, 0]


def confident() -> MiniMaxM1ForCausalLM:
    """Nearly certain of every token, and never in a loop shorter than its vocabulary."""
    net = model()
    with torch.no_grad():
        net.lm_head.weight *= 300
    return net


def test_generation_ends_at_the_repetition_stop_and_says_so() -> None:
    net, ids = confident(), tokens(1, 9)
    free = generate(net, ids, 20)
    assert free.shape[1] == 20
    stop = RepetitionStop(run=6)
    found = generate(net, ids, 20, repetition_stop=stop)
    assert torch.equal(found, free[:, :6])
    assert finish_reasons(found, end_tokens=None, repetition_stop=stop) == ["repetition"]
    again = generate(net, ids, 20, repetition_stop=stop)
    assert torch.equal(again, found)
    assert generate(net, ids, 20, repetition_stop=RepetitionStop()).shape[1] == 20


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 30.0, "do_sample": True},
        {"top_k": 1, "do_sample": True},
        {"repetition_penalty": 5.0},
        {"suppress_tokens": [3]},
    ],
    ids=str,
)
def test_what_counts_is_the_models_own_probability(options: dict) -> None:
    """Warpers and penalties change what is drawn, not how sure the model was of it."""
    net, ids = model(), tokens(1, 9)
    with torch.no_grad():
        net.lm_head.weight *= 4
    torch.manual_seed(0)
    found = generate(net, ids, 12, **options)
    with torch.no_grad():
        p = net(torch.cat([ids, found], 1)).logits[:, 8:-1].softmax(-1).gather(-1, found[..., None])[0, :, 0]
    threshold = (p.sort().values[5] + p.sort().values[6]).item() / 2
    expected = run(RepetitionStop(run=2, threshold=threshold), p.tolist())
    stop = RepetitionStop(run=2, threshold=threshold)
    torch.manual_seed(0)
    generate(net, ids, 12, repetition_stop=stop, **options)
    assert stop.stopped_after.tolist() == [expected or 0]


def test_rows_of_a_batch_end_each_for_its_own_reason() -> None:
    """Row 0 ends by repetition and goes on with padding that is also the end token; row 1 runs to length."""
    net = confident()
    ids = tokens(2, 9)
    free = generate(net, ids, 10)
    end = int(free[1, 3])
    assert end not in free[0, :6]
    stop = RepetitionStop(run=6)
    found = generate(net, ids, 10, repetition_stop=stop, eos_token_id=end, pad_token_id=end)
    assert finish_reasons(found, end_tokens=end, repetition_stop=stop) == ["repetition", "end"]


@pytest.mark.parametrize(
    "row, stopped_after, reason",
    [
        ([5, 6, 7, 8], 0, "length"),
        ([5, 9, 0, 0], 0, "end"),
        ([5, 6, 9, 9], 2, "repetition"),
        ([5, 9, 9, 9], 2, "end"),
        ([5, 9, 9, 9], 4, "end"),
        ([5, 6, 7, 8], 4, "repetition"),
    ],
)
def test_the_first_of_two_reasons_counts(row: list[int], stopped_after: int, reason: str) -> None:
    stop = RepetitionStop(run=1)
    stop.stopped_after = torch.tensor([stopped_after])
    assert finish_reasons(torch.tensor([row]), end_tokens=[9, 10], repetition_stop=stop) == [reason]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "cannot be used with num_beams"),
        ({"prompt_lookup_num_tokens": 2}, "prompt lookup"),
        ({"prompt_lookup_num_tokens": 9999}, "prompt_lookup_num_tokens is 9999"),
        ({"assistant_early_exit": 1}, "assistant_early_exit drafts"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("positional", [True, False])
def test_a_generation_config_is_checked_however_it_is_given(options, words, positional) -> None:
    config = GenerationConfig(**GREEDY, max_new_tokens=3, **options)
    with pytest.raises(ValueError, match=words):
        if positional:
            NET.generate(tokens(1, 9), config, repetition_stop=RepetitionStop())
        else:
            NET.generate(tokens(1, 9), generation_config=config, repetition_stop=RepetitionStop())


def test_processors_and_criteria_may_be_positional() -> None:
    config = GenerationConfig(**GREEDY, max_new_tokens=3)
    found = NET.generate(tokens(1, 9), config, [], [], repetition_stop=RepetitionStop())
    assert torch.equal(found, NET.generate(tokens(1, 9), config))


def test_the_repetition_stop_is_refused_where_it_cannot_count() -> None:
    for options in (
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_model": assistant("llama")},
    ):
        with pytest.raises(ValueError, match="counts tokens one by one"):
            generate(NET, tokens(1, 9), repetition_stop=RepetitionStop(), **options)


# Ends


def test_any_of_several_end_tokens_ends_a_row_and_none_is_needed() -> None:
    ids = tokens(1, 9)
    free = generate(NET, ids, 30)[0].tolist()
    ends = [free[4], free[2]]
    first = min(free.index(end) for end in ends)
    found = generate(NET, ids, 30, eos_token_id=ends)
    assert found[0].tolist() == free[: first + 1]
    assert finish_reasons(found, end_tokens=ends) == ["end"]
    assert finish_reasons(torch.tensor([free]), end_tokens=None) == ["length"]
    assert finish_reasons(torch.zeros(2, 0, dtype=torch.long), end_tokens=1) == ["length", "length"]


def test_padding_may_be_the_end_token() -> None:
    rows = [tokens(1, 9)[0], tokens(1, 4, seed=1)[0]]
    ids, mask = left_padded(rows)
    free = generate(NET, ids, 12, attention_mask=mask)
    end = int(free[0, 3])
    found = generate(NET, ids, 12, attention_mask=mask, eos_token_id=end, pad_token_id=end)
    for b in range(2):
        row = free[b].tolist()
        stop = row.index(end) + 1 if end in row else 12
        assert found[b, :stop].tolist() == row[:stop]
        assert found[b, stop:].eq(end).all()


# Agreement of generation and training


def decoded_log_probs(net: MiniMaxM1ForCausalLM, prompts: Tensor, new: Tensor, mask: Tensor | None) -> Tensor:
    """log p of each new token (B, N) as recorded while decoding with the cache."""
    cache, recorded = HybridCache(net.config), []
    with torch.no_grad():
        logits = net(prompts, attention_mask=mask, past_key_values=cache).logits[:, -1]
        for t in range(new.shape[1]):
            recorded.append(logits.log_softmax(-1).gather(-1, new[:, t : t + 1]))
            logits = net(new[:, t : t + 1], past_key_values=cache).logits[:, -1]
    return torch.cat(recorded, dim=1)


def agreement(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities of 32 tokens after 8 while decoding, and in one forward: alone, padded, packed."""
    net = model().to(dtype)
    prompts, pairs = tokens(2, 8), []
    torch.manual_seed(0)
    new = generate(net, prompts, 32, do_sample=True)
    recorded = decoded_log_probs(net, prompts, new, None)
    whole = torch.cat([prompts, new], dim=1)
    with torch.no_grad():
        pairs.append((net.log_probs(whole)[:, 8:], recorded))
        ids, mask = left_padded([*whole, tokens(1, 50)[0]])
        pairs.append((net.log_probs(ids, attention_mask=mask)[:2, -32:], recorded))
        packed, ids_positions = whole.flatten()[None], torch.arange(40).repeat(2)[None]
        found = net.log_probs(packed, position_ids=ids_positions).view(2, 40)[:, 8:]
        pairs.append((found, recorded))
    return pairs


def test_log_probs_of_generation_and_training_agree_in_float32() -> None:
    for scored, recorded in agreement(torch.float32):
        assert difference(scored, recorded) < 1e-5
        assert ((scored - recorded).exp() - 1).abs().max() < 1e-4


def test_probabilities_of_generation_and_training_correlate_in_bfloat16() -> None:
    for scored, recorded in agreement(torch.bfloat16):
        correlation = torch.corrcoef(torch.stack([scored, recorded]).exp().flatten(1))[0, 1]
        assert correlation > 0.99


def test_a_generation_config_is_honoured() -> None:
    settings = GenerationConfig(max_new_tokens=5, **GREEDY)
    assert torch.equal(NET.generate(tokens(1, 9), settings)[:, 9:], generate(NET, tokens(1, 9), 5))
