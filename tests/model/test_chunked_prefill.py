"""A prompt in pieces gives what it gives whole, and no mask of piece times past is made."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minimax_hybrid.chunked_prefill import NAME, prefill
from minimax_hybrid.config import MiniMaxM1Config
from minimax_hybrid.model import MiniMaxM1ForCausalLM


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MiniMaxM1ForCausalLM(MiniMaxM1Config.tiny()).eval()


def tokens(B: int, T: int) -> torch.Tensor:
    return torch.randint(0, 128, (B, T), generator=torch.Generator().manual_seed(T))


@pytest.mark.parametrize("piece", [1, 7, 64, 100, 299, 300, 1000])
def test_any_piece_gives_the_logits_of_one_forward(model, piece):
    ids = tokens(2, 300)
    with torch.inference_mode():
        whole = model(ids).logits[:, -1]
    logits, cache = prefill(model, ids, piece=piece)
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 300


def test_decoding_goes_on_from_a_prefilled_cache(model):
    ids = tokens(1, 200)
    with torch.inference_mode():
        whole = model(ids).logits[:, -1]
        _, cache = prefill(model, ids[:, :199], piece=50)
        step = model(ids[:, 199:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(step, whole, atol=1e-5, rtol=1e-5)


def test_a_prefill_can_stop_and_go_on(model):
    ids, seen = tokens(1, 200), []
    _, cache = prefill(model, ids[:, :120], piece=40, after_piece=seen.append)
    logits, _ = prefill(model, ids[:, 120:], piece=40, cache=cache, after_piece=seen.append)
    whole, _ = prefill(model, ids)
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)
    assert seen == [40, 80, 120, 40, 80]


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_no_tensor_grows_with_piece_times_past(model):
    T, piece = 4096, 512
    ids = tokens(1, T)
    with Largest() as largest:
        prefill(model, ids, piece=piece)
    assert largest.elements < piece * T / 4
    # the mask that is avoided would have been seen
    with Largest() as largest, torch.inference_mode():
        cache = model(ids[:, :-piece], use_cache=True).past_key_values
        model.set_attn_implementation("sdpa")
        model(ids[:, -piece:], past_key_values=cache)
    assert largest.elements >= piece * T


def test_padding_and_packing_still_meet_their_mask(model):
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    documents = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, 40)
    for arguments in ({"attention_mask": mask}, {"position_ids": documents}):
        results = []
        for name in ("sdpa", NAME):
            model.set_attn_implementation(name)
            with torch.inference_mode():
                results.append(model(ids, **arguments).logits[:, 9:])
        model.set_attn_implementation("sdpa")
        assert torch.equal(*results)


def test_gradients_flow_through_a_continued_piece(model):
    ids = tokens(1, 30)
    found = []
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        cache = model(ids[:, :20], use_cache=True).past_key_values
        embeds = model.model.embed_tokens(ids[:, 20:]).detach().requires_grad_()
        model(inputs_embeds=embeds, past_key_values=cache).logits.square().mean().backward()
        found.append(embeds.grad)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)
    assert found[0].abs().max() > 0


def test_the_model_keeps_its_attention_and_bad_input_is_refused(model):
    before = model.config._attn_implementation
    prefill(model, tokens(1, 5))
    assert model.config._attn_implementation == before
    with pytest.raises(ValueError, match=r"T of at least 1.*\(1, 0\)"):
        prefill(model, tokens(1, 0))
    with pytest.raises(ValueError, match="got .* and 0"):
        prefill(model, tokens(1, 5), piece=0)
