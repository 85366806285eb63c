"""Claims about `generate` from prompts with padding behind or around their tokens."""

import pytest
import torch
from tiny import left_padded, model, tokens
from torch import Tensor

from minimax_hybrid.compat import CACHE_NAME

NET = model()
GREEDY = dict(do_sample=False, pad_token_id=0, eos_token_id=None, max_new_tokens=12)
PROMPTS = [tokens(1, n, seed=n)[0] for n in (5, 9, 70)]


def padded(before: list[int], gap: int = 0) -> tuple[Tensor, Tensor]:
    """The prompts with `before` positions of padding in front, `gap` after two tokens, the rest behind."""
    T = 75 + gap
    ids, mask = torch.zeros(3, T, dtype=torch.long), torch.zeros(3, T, dtype=torch.long)
    for b, (prompt, first) in enumerate(zip(PROMPTS, before, strict=True)):
        columns = first + torch.arange(len(prompt)) + gap * (torch.arange(len(prompt)) > 1)
        ids[b, columns], mask[b, columns] = prompt, 1
    return ids, mask


LAYOUTS = {"right": padded([0, 0, 0]), "around": padded([3, 60, 2]), "gaps": padded([0, 4, 1], gap=3)}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    return LAYOUTS[request.param]


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"use_cache": False}], ids=str
)
def test_each_prompt_gives_the_tokens_it_gives_alone(layout: tuple[Tensor, Tensor], options: dict) -> None:
    ids, mask = layout
    found = NET.generate(ids, attention_mask=mask, **GREEDY, **options)
    copies = options.get("num_return_sequences", 1)
    assert torch.equal(found[:, : ids.shape[1]], ids.repeat_interleave(copies, dim=0))
    for b, prompt in enumerate(PROMPTS):
        alone = NET.generate(prompt[None], **GREEDY, **options)[:, len(prompt) :]
        assert torch.equal(found[b * copies : (b + 1) * copies, ids.shape[1] :], alone)


def test_sampling_draws_what_it_draws_from_left_padding(layout: tuple[Tensor, Tensor]) -> None:
    ids, mask = layout
    left, left_mask = left_padded(PROMPTS)
    found = []
    for x, shown in ((ids, mask), (left, left_mask)):
        torch.manual_seed(3)
        options = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
        found.append(NET.generate(x, attention_mask=shown, **options)[:, x.shape[1] :])
    assert torch.equal(*found)


@pytest.mark.parametrize("way", ["assistant", "lookup"])
def test_drafts_give_the_greedy_tokens(layout: tuple[Tensor, Tensor], way: str) -> None:
    helper = model(seed=1)
    helper.generation_config.num_assistant_tokens = 4
    options = {"assistant_model": helper} if way == "assistant" else {"prompt_lookup_num_tokens": 4}
    for b, prompt in enumerate(PROMPTS):
        ids, mask = (x[b : b + 1] for x in layout)
        found = NET.generate(ids, attention_mask=mask, **GREEDY, **options)
        assert torch.equal(found[:, : ids.shape[1]], ids)
        assert torch.equal(found[:, ids.shape[1] :], NET.generate(prompt[None], **GREEDY)[:, len(prompt) :])


def test_embeddings_may_be_padded_too(layout: tuple[Tensor, Tensor]) -> None:
    ids, mask = layout
    embeds = NET.model.embed_tokens(ids).detach()
    wanted = NET.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(NET.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY), wanted[:, -12:])
    both = NET.generate(input_ids=ids, inputs_embeds=embeds, attention_mask=mask, **GREEDY)
    assert torch.equal(both, wanted)


def test_positions_of_the_caller_move_with_their_tokens(layout: tuple[Tensor, Tensor]) -> None:
    ids, mask = layout
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    wanted = NET.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(NET.generate(ids, attention_mask=mask, position_ids=positions, **GREEDY), wanted)


def test_the_prompt_comes_back_in_a_structured_answer_and_the_cache_holds_no_padding_behind_it() -> None:
    ids, mask = LAYOUTS["right"]
    found = NET.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **GREEDY)
    assert torch.equal(found.sequences, NET.generate(ids, attention_mask=mask, **GREEDY))
    assert len(found.scores) == 12
    token_mask = found[CACHE_NAME].token_mask
    assert token_mask[:, -12:].all() and torch.equal(token_mask.sum(1), mask.sum(1) + 11)


def test_what_came_in_is_not_changed() -> None:
    ids, mask = (x.clone() for x in LAYOUTS["around"])
    NET.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(ids, LAYOUTS["around"][0]) and torch.equal(mask, LAYOUTS["around"][1])


def test_padding_behind_tokens_that_nothing_tells_of_is_refused() -> None:
    """transformers guesses a mask from the padding token, too late to move anything."""
    ids, mask = LAYOUTS["right"]
    with pytest.raises(ValueError, match=r"sequences \[0, 1, 2\] end in padding.*give attention_mask"):
        NET.generate(ids, **{**GREEDY, "eos_token_id": 1})
    with pytest.raises(ValueError, match="one mask value for each of its positions"):
        NET.generate(ids[:, :60], attention_mask=mask, **GREEDY)
