"""What a folder must hold: refusals by name before anything is read, and what `strict=False` makes of it."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same_weights, save, weights_in
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from minimax_hybrid import MiniMaxM1ForCausalLM, MiniMaxM1Model
from minimax_hybrid.checkpoint.headers import INDEX, SINGLE, read_headers

EXPERT = "model.layers.1.block_sparse_moe.experts.10.w1.weight"
NORM = "model.layers.2.input_layernorm.weight"
OUTER = NORM.replace("input", "outer")
STACK = "model.layers.1.block_sparse_moe.experts.gate_up_proj"


@pytest.fixture
def two_shards(good: Path, tmp_path: Path) -> Path:
    """A good checkpoint in two shards, to be damaged."""
    return save(tmp_path / "two", weights_in(good), shards=2, config=good)


@pytest.fixture
def no_tensor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers fails at the first tensor that it opens, so a refusal came before."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a shard was opened before the refusal")

    monkeypatch.setattr("transformers.modeling_utils.safe_open", refuse)


# Names and what becomes of their tensors; None takes one away.
Damage = dict[str, Tensor | None]
EMBEDDING, EXTRA = "model.embed_tokens.weight", "model.layers.0.self_attn.extra.weight"
DROPPED: Damage = {EXPERT: None}
RENAMED: Damage = {NORM: None, OUTER: torch.ones(32)}
SHORTENED: Damage = {EMBEDDING: torch.ones(60, 32)}
ADDED: Damage = {EXTRA: torch.zeros(3)}
SECOND, LATER, MORE = "model.layers.0.mlp.gate.weight", NORM.replace("2", "3"), EXPERT.replace("10", "12")
DAMAGES = {
    "an expert dropped": (DROPPED, [f"missing: {EXPERT}"]),
    "a norm renamed": (RENAMED, [f"missing: {NORM}", f"unexpected: {OUTER} (in model-0"]),
    "a shorter embedding": (SHORTENED, [f"shape: {EMBEDDING} (in model-0", "(60, 32)", "(61, 32)"]),
    "a tensor added": (ADDED, [f"unexpected: {EXTRA} (in model-0"]),
    "one of the other layout added": ({SECOND: torch.ones(12, 32)}, [f"unexpected: {SECOND}"]),
    "one layer more": ({LATER: torch.ones(32)}, [f"unexpected: {LATER}"]),
    "one expert more": ({MORE: torch.ones(16, 32)}, [f"unexpected: {MORE}"]),
    "a narrow expert": ({EXPERT: torch.ones(16, 31)}, [f"shape: {EXPERT}", "(16, 31)", "(16, 32)"]),
}


def damaged(folder: Path, *damages: Damage) -> dict[str, Tensor]:
    """The weights in a folder, changed."""
    tensors = weights_in(folder)
    for name, tensor in (change for damage in damages for change in damage.items()):
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor.clone()
    return tensors


class TestStrict:
    @pytest.mark.parametrize("damage, named", DAMAGES.values(), ids=DAMAGES)
    @pytest.mark.parametrize("load", [MiniMaxM1ForCausalLM, AutoModelForCausalLM])
    def test_weights_that_do_not_fit_are_refused_by_name_before_any_is_read(
        self,
        good: Path,
        tmp_path: Path,
        no_tensor_is_read: None,
        load: Any,
        damage: Damage,
        named: list[str],
    ) -> None:
        save(tmp_path, damaged(good, damage), shards=2, config=good)
        with pytest.raises(ValueError) as refusal:
            load.from_pretrained(tmp_path)
        assert str(tmp_path) in str(refusal.value) and "strict=False" in str(refusal.value)
        for words in named:
            assert words in str(refusal.value)
        assert len(str(refusal.value).splitlines()) == 1 + (2 if damage is RENAMED else 1)

    def test_a_long_list_is_cut(self, good: Path, tmp_path: Path) -> None:
        save(tmp_path, {"model.norm.weight": torch.zeros(32)}, config=good)
        with pytest.raises(ValueError, match=r"\.\.\. and \d+ more"):
            MiniMaxM1ForCausalLM.from_pretrained(tmp_path)

    def test_a_missing_shard_is_named(self, two_shards: Path, no_tensor_is_read: None) -> None:
        (two_shards / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
            MiniMaxM1ForCausalLM.from_pretrained(two_shards)

    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nowhere", "./nowhere/at/all"):
            with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
                MiniMaxM1ForCausalLM.from_pretrained(path)

    def test_a_folder_without_weights_is_named(self, good: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((good / "config.json").read_text())
        with pytest.raises(FileNotFoundError, match=rf"{tmp_path} holds no weights"):
            MiniMaxM1ForCausalLM.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        "text",
        ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "\x80"],
    )
    def test_an_index_that_is_none_is_named(
        self, two_shards: Path, no_tensor_is_read: None, text: str
    ) -> None:
        (two_shards / INDEX).write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is no index of shards"):
            MiniMaxM1ForCausalLM.from_pretrained(two_shards)

    def test_an_index_that_contradicts_its_shards_is_refused(self, two_shards: Path) -> None:
        index = json.loads((two_shards / INDEX).read_text())
        here = index["weight_map"][NORM]
        there = next(shard for shard in index["weight_map"].values() if shard != here)
        index["weight_map"][NORM] = there
        (two_shards / INDEX).write_text(json.dumps(index))
        with pytest.raises(ValueError, match=rf"places {NORM} in {there}, which does not hold it"):
            MiniMaxM1ForCausalLM.from_pretrained(two_shards)

    def test_a_tensor_in_two_shards_is_refused(self, two_shards: Path) -> None:
        shards = sorted(two_shards.glob("*.safetensors"))
        first, second = map(load_file, shards)
        name = next(iter(first))
        save_file(second | {name: first[name]}, shards[1], metadata={"format": "pt"})
        with pytest.raises(ValueError, match="a tensor has one place") as refusal:
            MiniMaxM1ForCausalLM.from_pretrained(two_shards)
        assert all(word in str(refusal.value) for word in (name, shards[0].name, shards[1].name))

    def test_two_sets_of_weights_are_refused(self, two_shards: Path, good: Path) -> None:
        save(two_shards, weights_in(good))
        with pytest.raises(ValueError, match="two sets of weights; remove one"):
            MiniMaxM1ForCausalLM.from_pretrained(two_shards)

    @pytest.mark.parametrize("keep", [0, 5, 100, -1])
    def test_a_truncated_shard_is_named(self, two_shards: Path, no_tensor_is_read: None, keep: int) -> None:
        shard = two_shards / "model-00001-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:keep])
        with pytest.raises(ValueError, match=rf"{shard} is not a whole safetensors file.*download it again"):
            MiniMaxM1ForCausalLM.from_pretrained(two_shards)

    def test_a_shard_of_noise_is_named(self, two_shards: Path, no_tensor_is_read: None) -> None:
        shard = two_shards / "model-00002-of-00002.safetensors"
        for noise in (b"<html>not found</html>", b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}xx"):
            shard.write_bytes(noise)
            with pytest.raises(ValueError, match=rf"{shard} is not a whole safetensors file"):
                MiniMaxM1ForCausalLM.from_pretrained(two_shards)

    def test_a_header_whose_shape_contradicts_its_bytes_is_refused(self, tmp_path: Path) -> None:
        header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
        (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(ValueError, match="a takes 8 bytes where its shape needs 12"):
            read_headers(tmp_path)


class TestLenient:
    def load(self, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
        with pytest.warns(UserWarning, match="does not fit its config"):
            return MiniMaxM1ForCausalLM.from_pretrained(folder, strict=False, output_loading_info=True)

    def test_nothing_is_reported_where_nothing_is_wrong(self, good: Path, small: nn.Module) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, info = MiniMaxM1ForCausalLM.from_pretrained(good, strict=False, output_loading_info=True)
        assert not any(info.values())
        assert_same_weights(found, small)

    @pytest.mark.parametrize("which", ["w1", "w2", "w3"])
    @pytest.mark.parametrize("damage", ["absent", "narrow"])
    def test_an_absent_expert_alone_is_initialised(
        self, good: Path, small: nn.Module, tmp_path: Path, which: str, damage: str
    ) -> None:
        part = EXPERT.replace("w1", which)
        tensors = weights_in(good)
        absent = tensors.pop(part)
        if damage == "narrow":
            tensors[part] = absent[:, 1:].clone()
        found, info = self.load(save(tmp_path, tensors, shards=2, config=good))
        if damage == "absent":
            assert info["missing_keys"] == {part} and not info["mismatched_keys"]
        else:
            wanted = tuple(absent.shape)
            assert info["mismatched_keys"] == {(part, (wanted[0], wanted[1] - 1), wanted)}
        assert not info["unexpected_keys"]
        stack = STACK if which != "w2" else STACK.replace("gate_up", "down")
        F = 16
        rows = {"w1": slice(0, F), "w3": slice(F, None), "w2": slice(None)}[which]
        new = found.get_parameter(stack)[10, rows]
        assert 0.01 < new.std() < 0.03 and new.abs().max() < 0.2  # initializer_range is 0.02
        with torch.no_grad():
            new.copy_(absent)
        assert_same_weights(found, small)

    def test_an_absent_expert_alone_is_initialised_in_a_stack_without_its_head_too(
        self, good: Path, small: nn.Module, tmp_path: Path
    ) -> None:
        tensors = weights_in(good)
        absent = tensors.pop(EXPERT)
        save(tmp_path, tensors, config=good)
        with pytest.warns(UserWarning):
            found = MiniMaxM1Model.from_pretrained(tmp_path, strict=False)
        with torch.no_grad():
            found.get_parameter(STACK.removeprefix("model."))[10, :16].copy_(absent)
        assert_same_weights(found, small.model)

    def test_the_three_lists_name_what_was_wrong(self, good: Path, small: nn.Module, tmp_path: Path) -> None:
        tensors = damaged(good, RENAMED, SHORTENED, ADDED)
        found, info = self.load(save(tmp_path, tensors, config=good))
        assert info["missing_keys"] == {NORM}
        assert info["unexpected_keys"] == {OUTER, EXTRA}
        assert info["mismatched_keys"] == {(EMBEDDING, (60, 32), (61, 32))}
        assert torch.equal(found.get_parameter(NORM), torch.ones(32))
        assert 0.01 < found.model.embed_tokens.weight.std() < 0.03
        assert found.model.embed_tokens.weight.norm(dim=-1).min() > 0
        for name, tensor in found.state_dict().items():
            assert torch.equal(tensor, small.state_dict()[name]) == (name not in {NORM, EMBEDDING}), name

    def test_a_stack_of_the_other_layout_may_be_absent(
        self, small: nn.Module, good: Path, tmp_path: Path
    ) -> None:
        state = {name: tensor.clone() for name, tensor in small.state_dict().items() if name != STACK}
        tensors = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in state.items()}
        found, info = self.load(save(tmp_path, tensors, config=good))
        assert len(info["missing_keys"]) == 24  # w1 and w3 of twelve experts, by their published names
        assert 0.01 < found.get_parameter(STACK).std() < 0.03
        assert torch.equal(found.get_parameter(NORM), small.get_parameter(NORM))

    def test_an_absent_router_is_made_in_float32(self, good: Path, tmp_path: Path) -> None:
        tensors, name = weights_in(good), "model.layers.1.block_sparse_moe.gate.weight"
        del tensors[name]
        save(tmp_path, tensors, config=good)
        with pytest.warns(UserWarning, match=f"missing: {name}"):
            found = MiniMaxM1ForCausalLM.from_pretrained(tmp_path, strict=False, dtype=torch.bfloat16)
        assert found.dtype == torch.bfloat16
        router = found.get_parameter(name)
        assert router.dtype == torch.float32 and 0.01 < router.std() < 0.03

    def test_auto_classes_are_lenient_on_request(self, good: Path, tmp_path: Path) -> None:
        save(tmp_path, damaged(good, ADDED), config=good)
        with pytest.warns(UserWarning, match=r"unexpected: model\.layers\.0\.self_attn\.extra\.weight"):
            AutoModelForCausalLM.from_pretrained(tmp_path, strict=False)

    def test_wrong_sizes_alone_can_be_allowed(self, good: Path, tmp_path: Path) -> None:
        save(tmp_path, damaged(good, SHORTENED), config=good)
        with pytest.warns(UserWarning, match="embed_tokens"):
            MiniMaxM1ForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
        save(tmp_path, damaged(good, SHORTENED, DROPPED))
        with pytest.raises(ValueError, match=EXPERT):
            MiniMaxM1ForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
