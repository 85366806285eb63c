"""Claims about what replaces or wraps head and router: float32 arithmetic stays, or the call is refused."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import V, config, model, tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.lm_head import LMHead

IDS = tokens(2, 9)


def bf16(**changes: object) -> MiniMaxM1ForCausalLM:
    return model(**changes).to(torch.bfloat16)


@torch.no_grad()
def logits(net: nn.Module) -> Tensor:
    found = net(IDS).logits
    assert found.dtype == torch.float32
    # logits of a bfloat16 head would all be bfloat16 numbers
    assert not torch.equal(found, found.bfloat16().float())
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mean_resizing", [False, True])
def test_new_tokens_leave_the_old_ones_bits(tied: bool, mean_resizing: bool, tmp_path: Path) -> None:
    net = bf16(tie_word_embeddings=tied)
    before, log_probs = logits(net), net.log_probs(IDS).detach()
    net.resize_token_embeddings(V + 8, mean_resizing=mean_resizing)
    assert type(net.lm_head) is LMHead and net.lm_head.out_features == V + 8
    grown = logits(net)
    assert torch.equal(grown[..., :V], before)
    # over the larger vocabulary; the plain head never makes the full logits
    wanted = grown[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    assert (net.log_probs(IDS)[:, 1:] - wanted).abs().max() < 2e-6
    net.save_pretrained(tmp_path)
    assert torch.equal(logits(MiniMaxM1ForCausalLM.from_pretrained(tmp_path)), grown)
    net.resize_token_embeddings(V)
    assert type(net.lm_head) is LMHead and net.lm_head.out_features == V
    assert torch.equal(logits(net), before) and torch.equal(net.log_probs(IDS), log_probs)


def test_a_frozen_head_stays_frozen_and_keeps_its_mode() -> None:
    net = bf16()
    net.lm_head.requires_grad_(False)
    net.resize_token_embeddings(V + 8)
    assert not net.lm_head.weight.requires_grad and not net.lm_head.training


@pytest.mark.parametrize("kind", ["Linear", "Embedding", "LMHead"])
def test_a_plain_layer_becomes_a_head_with_the_same_parameter(kind: str) -> None:
    net = bf16()
    before = logits(net)
    layer = {
        "Linear": nn.Linear(32, V, bias=False),
        "Embedding": nn.Embedding(V, 32),
        "LMHead": LMHead(32, V, head_dtype="float32"),
    }[kind]
    layer.weight = net.lm_head.weight
    net.set_output_embeddings(layer)
    assert type(net.lm_head) is LMHead and net.get_output_embeddings() is net.lm_head
    assert net.lm_head.weight is layer.weight
    assert torch.equal(logits(net), before)


def test_a_head_with_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for one, give a layer with bias=False"):
        model().set_output_embeddings(nn.Linear(32, V))


def test_a_head_that_rounds_is_refused_with_the_ways_out() -> None:
    net = bf16()
    net.lm_head = nn.Linear(32, V, bias=False, dtype=torch.bfloat16)
    for call in (lambda: net(IDS), lambda: net.log_probs(IDS), lambda: net.generate(IDS, max_new_tokens=1)):
        with pytest.raises(ValueError, match="gives torch.bfloat16 and config.head_dtype is float32"):
            call()
    net.config.head_dtype = "bfloat16"
    assert net(IDS).logits.dtype == torch.bfloat16
    net.config.head_dtype = "float32"
    net.set_output_embeddings(net.lm_head)
    logits(net)


@pytest.mark.parametrize(
    "change",
    [
        lambda net, _: copy.deepcopy(net),
        lambda net, _: pickle.loads(pickle.dumps(net)),
        lambda net, _: net.to(torch.bfloat16),
        lambda net, _: net.float().bfloat16(),
        lambda net, _: net.half().bfloat16(),
        lambda net, _: (net.tie_weights(), net)[1],
    ],
    ids=["deepcopy", "pickle", "to", "float", "half", "tie_weights"],
)
def test_copies_and_casts_keep_the_arithmetic(change, tmp_path: Path) -> None:
    net = bf16(tie_word_embeddings=True)
    before = logits(net)
    other = change(net, tmp_path)
    assert type(other.lm_head) is LMHead
    assert torch.equal(logits(other), before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "gate"]},
        {"target_modules": ["lm_head", "q_proj"]},
    ],
    ids=str,
)
def test_adapters_keep_the_arithmetic(options: dict) -> None:
    net = bf16()
    before = logits(net)
    adapted = get_peft_model(net, LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    assert torch.equal(logits(adapted), before)  # nothing learnt yet
    for name, p in adapted.named_parameters():
        assert p.dtype == torch.float32 or "moe.gate." not in name, name
    loss = adapted(IDS, labels=IDS).loss
    loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    assert torch.equal(logits(adapted.merge_and_unload()), before)


# The router


def routers(net: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in net.named_parameters() if name.endswith("moe.gate.weight")}


@pytest.mark.parametrize(
    "way", ["from_pretrained", "from_config", "to", "bfloat16", "half", "default_dtype", "to_empty"]
)
def test_the_router_is_float32_however_the_model_is_built(way: str, tmp_path: Path) -> None:
    source = model()
    weights = copy.deepcopy(source.state_dict())
    if way == "from_pretrained":
        source.save_pretrained(tmp_path)
        net = MiniMaxM1ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    elif way == "from_config":
        net = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
        net.load_state_dict(weights)
    elif way == "default_dtype":
        torch.set_default_dtype(torch.bfloat16)
        try:
            net = MiniMaxM1ForCausalLM(config())
        finally:
            torch.set_default_dtype(torch.float32)
        net.load_state_dict(weights)
    elif way == "to_empty":
        with torch.device("meta"):
            net = MiniMaxM1ForCausalLM(config())
        net = net.to(torch.bfloat16).to_empty(device="cpu")
        net.load_state_dict(weights)
    else:
        net = source.to(torch.bfloat16) if way == "to" else getattr(source, way)()
    assert net.dtype == (torch.float16 if way == "half" else torch.bfloat16)
    assert len(routers(net)) == 4
    for name, weight in routers(net).items():
        assert weight.dtype == torch.float32, name
        assert torch.equal(weight, weights[name]), name
    net.save_pretrained(tmp_path / "saved")
    again = MiniMaxM1ForCausalLM.from_pretrained(tmp_path / "saved")
    for name, p in net.named_parameters():
        assert again.get_parameter(name).dtype == p.dtype and torch.equal(again.get_parameter(name), p), name
