"""Conversion between the published layouts: bytes moved, nothing half written, differences said in words."""

import json
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same_weights, save, weights_in
from tiny import many_experts
from torch import nn
from transformers import MiniMaxForCausalLM

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM, MiniMaxM1Model
from minimax_hybrid.checkpoint.conversion import convert
from minimax_hybrid.checkpoint.headers import INDEX, SINGLE, read_headers

# where transformers' own class computes what ours does
SAME_MODEL = dict(rotary_dim=16, attn_type_list=[1, 0, 1])


def fields(folder: Path) -> dict[str, Any]:
    read = json.loads((folder / "config.json").read_text())
    read.pop("transformers_version", None)
    return read


def quietly(source: Path, target: Path, **options: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert(source, target, **options)


@pytest.mark.parametrize("release", ["minimax_m1", "minimax_text_01"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_again_keeps_every_bit(tmp_path: Path, release: str, dtype: torch.dtype) -> None:
    model = many_experts().to(dtype)
    model.model.layers[0].block_sparse_moe.gate.float()  # as in the release
    model.save_pretrained(tmp_path / "a", max_shard_size="30KB")
    quietly(tmp_path / "a", tmp_path / "release", layout=release)
    quietly(tmp_path / "release", tmp_path / "stacked", layout="minimax", max_shard_bytes=30_000)
    quietly(tmp_path / "stacked", tmp_path / "back", layout=release, max_shard_bytes=30_000)
    before, between, after = (weights_in(tmp_path / name) for name in ("a", "stacked", "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    stack = between["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(stack, model.model.layers[1].block_sparse_moe.experts.gate_up_proj)
    assert not any("block_sparse_moe" in name for name in between)
    assert fields(tmp_path / "release") == fields(tmp_path / "back")
    assert fields(tmp_path / "back")["model_type"] == release
    assert fields(tmp_path / "stacked")["model_type"] == "minimax"
    for name in ("release", "stacked", "back"):
        assert_same_weights(MiniMaxM1ForCausalLM.from_pretrained(tmp_path / name), model)


def test_shards_keep_to_their_size_and_agree_with_their_index(good: Path, tmp_path: Path) -> None:
    quietly(good, tmp_path / "b", layout="minimax", max_shard_bytes=60_000)
    tensors = read_headers(tmp_path / "b")
    index = json.loads((tmp_path / "b" / INDEX).read_text())
    assert index["weight_map"] == {name: tensor.file for name, tensor in tensors.items()}
    assert index["metadata"]["total_size"] == sum(tensor.bytes for tensor in tensors.values())
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.file] = sizes.get(tensor.file, 0) + tensor.bytes
    assert len(sizes) > 1
    assert max(sizes.values()) <= max(60_000, max(tensor.bytes for tensor in tensors.values()))


def test_transformers_own_class_computes_the_same_from_the_result(tmp_path: Path) -> None:
    ours = many_experts(**SAME_MODEL)
    ours.save_pretrained(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert convert(tmp_path / "a", tmp_path / "b", layout="minimax") == []
    theirs, info = MiniMaxForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert all("decay" in name or "slope" in name for name in info["missing_keys"])  # tables it computes
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(ids).logits, ours(ids).logits, rtol=0, atol=2e-5)


def test_a_folder_saved_by_transformers_own_class_becomes_a_release(tmp_path: Path) -> None:
    ours = many_experts(**SAME_MODEL)
    ours.save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", layout="minimax")
    MiniMaxForCausalLM.from_pretrained(tmp_path / "b").save_pretrained(tmp_path / "c")
    assert any("slope_rate" in name for name in weights_in(tmp_path / "c"))
    convert(tmp_path / "c", tmp_path / "d", layout="minimax_m1")
    before, after = weights_in(tmp_path / "a"), weights_in(tmp_path / "d")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rotary_dim": 8}, "rotates all 16 dimensions of a head, this model the first 8"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "6 heads, which is not a power of two"),
        ({"postnorm": False}, "postnorm is false"),
        ({"shared_intermediate_size": 16}, "no shared expert"),
    ],
)
def test_where_transformers_computes_another_model_it_is_said(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    model = many_experts(**(SAME_MODEL | changes))
    model.save_pretrained(tmp_path / "a")
    with pytest.warns(UserWarning, match=words):
        notes = convert(tmp_path / "a", tmp_path / "b", layout="minimax")
    assert len(notes) == 1 and words in notes[0]
    assert_same_weights(MiniMaxM1ForCausalLM.from_pretrained(tmp_path / "b"), model)


def test_other_files_come_along_and_other_weights_and_code_do_not(good: Path, tmp_path: Path) -> None:
    source = save(tmp_path / "a", weights_in(good), config=good)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        (source / name).write_text(f"this is {name}")
        (source / name).chmod(stat.S_IRUSR)
    for name in ("modeling_minimax_m1.py", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        (source / name).write_text("not wanted")
    quietly(source, tmp_path / "b", layout="minimax")
    names = {file.name for file in (tmp_path / "b").iterdir()}
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"}
    assert names == copied | {"config.json", SINGLE}
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "this is tokenizer.json"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


def test_a_tied_head_stays_out_and_the_stack_alone_converts(small: nn.Module, tmp_path: Path) -> None:
    tied = many_experts(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "a")
    quietly(tmp_path / "a", tmp_path / "b", layout="minimax")
    assert "lm_head.weight" not in weights_in(tmp_path / "b")
    assert_same_weights(MiniMaxM1ForCausalLM.from_pretrained(tmp_path / "b"), tied)
    small.model.save_pretrained(tmp_path / "c")
    quietly(tmp_path / "c", tmp_path / "d", layout="minimax")
    assert fields(tmp_path / "d")["architectures"] == ["MiniMaxModel"]
    assert_same_weights(MiniMaxM1Model.from_pretrained(tmp_path / "d"), small.model)


def test_a_config_without_a_type_gets_the_weights_main_one(good: Path, tmp_path: Path) -> None:
    source = save(tmp_path / "a", {name: x.bfloat16() for name, x in weights_in(good).items()})
    (source / "config.json").write_text(json.dumps(fields(good) | {"dtype": None}))
    quietly(source, tmp_path / "b", layout="minimax")
    assert fields(tmp_path / "b")["dtype"] == "bfloat16"


class TestRefusals:
    def refused(self, source: Path, target: Path, words: str, **options: Any) -> None:
        before = sorted(target.parent.iterdir())
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            convert(source, target, **({"layout": "minimax"} | options))
        assert sorted(target.parent.iterdir()) == before  # nothing new, nothing gone

    def test_of_an_unknown_layout(self, good: Path, tmp_path: Path) -> None:
        self.refused(good, tmp_path / "b", "layout is 'gguf'; choose one of minimax_m1", layout="gguf")

    def test_of_a_target_that_holds_something(self, good: Path, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "mine.txt").write_text("keep")
        self.refused(good, tmp_path / "b", "is not empty")
        assert (tmp_path / "b" / "mine.txt").read_text() == "keep"
        self.refused(good, tmp_path / "b" / "mine.txt", "is a file")
        self.refused(good, good, "is not empty")

    def test_of_a_source_that_is_none(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "nowhere", tmp_path / "b", "holds no config.json")

    def test_of_weights_that_do_not_fit(self, good: Path, tmp_path: Path) -> None:
        tensors = weights_in(good)
        del tensors["model.norm.weight"]
        source = save(tmp_path / "a", tensors, config=good)
        self.refused(source, tmp_path / "b", r"missing: model\.norm\.weight")

    def test_of_experts_of_several_types(self, good: Path, tmp_path: Path) -> None:
        tensors = weights_in(good)
        name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
        tensors[name] = tensors[name].bfloat16()
        source = save(tmp_path / "a", tensors, config=good)
        self.refused(source, tmp_path / "b", r"have types \['BF16', 'F32'\]; a stack has one")
        quietly(source, tmp_path / "c", layout="minimax_text_01")  # apart, each keeps its own
        assert weights_in(tmp_path / "c")[name].dtype == torch.bfloat16

    def test_leaves_nothing_behind_when_writing_fails(
        self, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: Any) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(Path, "rename", fail)  # the last step
        with pytest.raises(OSError, match="no space left"):
            quietly(good, tmp_path / "b", layout="minimax_m1")
        assert not list(tmp_path.iterdir())

    def test_of_a_model_larger_than_the_disk(
        self, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
        self.refused(good, tmp_path / "b", "has 1000 bytes left and the weights take", layout="minimax_m1")


def test_an_empty_target_folder_is_used(good: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    quietly(good, tmp_path / "b", layout="minimax_m1")
    assert MiniMaxM1Config.from_pretrained(tmp_path / "b").num_local_experts == 12
