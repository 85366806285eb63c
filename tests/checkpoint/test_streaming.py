"""What leaves for an inference engine has the published names, all of them, and the policy's values."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import letters

from minimax_hybrid.checkpoint.streaming import published_weights

LIGHTNING = ("qkv_proj", "output_gate", "norm", "out_proj")
SOFTMAX = ("q_proj", "k_proj", "v_proj", "o_proj")


def release_names(kinds: list[int], experts: int) -> set[str]:
    """The names of the released checkpoint's index, for these layers."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i, kind in enumerate(kinds):
        layer = f"model.layers.{i}"
        names |= {f"{layer}.self_attn.{part}.weight" for part in (SOFTMAX if kind else LIGHTNING)}
        names |= {f"{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")}
        names.add(f"{layer}.block_sparse_moe.gate.weight")
        names |= {
            f"{layer}.block_sparse_moe.experts.{e}.{part}.weight"
            for e in range(experts)
            for part in ("w1", "w2", "w3")
        }
    return names


def test_streamed_and_saved_weights_have_every_published_name_and_one_value(tmp_path: Path) -> None:
    model = letters(layers=3)
    streamed = dict(published_weights(model))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(streamed) == set(saved) == release_names([0, 0, 1], experts=4)
    for name, value in saved.items():
        assert torch.equal(streamed[name], value), name


def test_a_bfloat16_copy_keeps_its_routers_in_float32() -> None:
    for name, value in published_weights(letters(), dtype=torch.bfloat16):
        assert value.dtype == (torch.float32 if name.endswith("moe.gate.weight") else torch.bfloat16), name
