"""Checkpoints in every published form: loaded into the same weights, and written back without a loss."""

import inspect
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same_weights, save, weights_in
from safetensors.torch import load_file
from tiny import many_experts, many_experts_config
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from minimax_hybrid import (
    MiniMaxM1Config,
    MiniMaxM1ForCausalLM,
    MiniMaxM1Model,
    MiniMaxText01ForCausalLM,
)
from minimax_hybrid.checkpoint.headers import SINGLE
from minimax_hybrid.checkpoint.loading import model_on_meta, published_shapes
from minimax_hybrid.config import to_transformers

GOLDENS = Path(__file__).parents[1] / "goldens"
NORM = "model.layers.2.input_layernorm.weight"


class TestSavingAndLoading:
    def test_a_sharded_round_trip_keeps_every_bit_and_every_name(self, good: Path, small: nn.Module) -> None:
        again, info = MiniMaxM1ForCausalLM.from_pretrained(good, output_loading_info=True)
        assert_same_weights(again, small)
        assert not any(info.values())
        published = {name: tuple(tensor.shape) for name, tensor in weights_in(good).items()}
        assert published == published_shapes(small)
        assert json.loads((good / "config.json").read_text())["architectures"] == ["MiniMaxM1ForCausalLM"]

    @pytest.mark.parametrize("shard_size", ["40KB", "5GB"])
    def test_a_variant_is_found_by_its_name(self, small: nn.Module, tmp_path: Path, shard_size: str) -> None:
        small.save_pretrained(tmp_path, variant="fp16", max_shard_size=shard_size)
        assert_same_weights(MiniMaxM1ForCausalLM.from_pretrained(tmp_path, variant="fp16"), small)
        with pytest.raises(FileNotFoundError, match="holds no weights"):
            MiniMaxM1ForCausalLM.from_pretrained(tmp_path)

    def test_what_was_loaded_is_saved_as_it_was(self, good: Path, tmp_path: Path) -> None:
        MiniMaxM1ForCausalLM.from_pretrained(good).save_pretrained(tmp_path, max_shard_size="40KB")
        before, after = weights_in(good), weights_in(tmp_path)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert (tmp_path / "config.json").read_text() == (good / "config.json").read_text()

    def test_a_folder_of_the_release_is_written_back_as_it_was(self, tmp_path: Path) -> None:
        golden = GOLDENS / "case_c"
        MiniMaxM1ForCausalLM.from_pretrained(golden).save_pretrained(tmp_path)
        before, after = load_file(golden / SINGLE), weights_in(tmp_path)
        assert before.keys() == after.keys()
        for name, tensor in before.items():  # routers were stored in bfloat16 and are kept in float32
            assert torch.equal(tensor.float(), after[name].float())
            assert after[name].dtype == (torch.float32 if ".gate." in name else torch.bfloat16)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_routers_stay_in_float32_in_a_narrow_model(
        self, good: Path, small: nn.Module, tmp_path: Path, dtype: torch.dtype
    ) -> None:
        narrow = MiniMaxM1ForCausalLM.from_pretrained(good, dtype=dtype)
        for name, parameter in narrow.named_parameters():
            assert parameter.dtype == (torch.float32 if name.endswith("moe.gate.weight") else dtype), name
        gate = "model.layers.0.block_sparse_moe.gate.weight"
        assert torch.equal(narrow.get_parameter(gate), small.get_parameter(gate))
        narrow.save_pretrained(tmp_path)
        assert weights_in(tmp_path)[gate].dtype == torch.float32
        assert weights_in(tmp_path)[NORM].dtype == dtype
        again = MiniMaxM1ForCausalLM.from_pretrained(tmp_path)
        assert again.dtype == dtype and again.get_parameter(gate).dtype == torch.float32

    def test_a_head_trained_in_float32_is_saved_in_the_models_type(self, good: Path, tmp_path: Path) -> None:
        narrow = MiniMaxM1ForCausalLM.from_pretrained(good, dtype=torch.bfloat16)
        narrow.lm_head.float()
        with torch.no_grad():
            narrow.lm_head.weight.add_(1e-3)
        narrow.save_pretrained(tmp_path)
        head = weights_in(tmp_path)["lm_head.weight"]
        assert head.dtype == torch.bfloat16 and torch.equal(head, narrow.lm_head.weight.bfloat16())
        assert narrow.lm_head.weight.dtype == torch.float32
        assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"

    def test_without_a_type_in_the_config_the_main_one_counts(self, good: Path, tmp_path: Path) -> None:
        tensors = weights_in(good)
        tensors = {name: x if ".gate." in name else x.bfloat16() for name, x in tensors.items()}
        save(tmp_path, tensors, config=good)
        fields = json.loads((tmp_path / "config.json").read_text())
        del fields["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(fields))
        # what transformers would go by
        assert next(iter(load_file(tmp_path / SINGLE).values())).dtype == torch.float32
        for chosen in ({}, {"dtype": "auto"}):
            assert MiniMaxM1ForCausalLM.from_pretrained(tmp_path, **chosen).dtype == torch.bfloat16
        wide = MiniMaxM1ForCausalLM.from_pretrained(tmp_path, dtype="float32")
        assert wide.dtype == torch.float32

    @pytest.mark.parametrize(
        "options", [{"low_cpu_mem_usage": True}, {"device_map": {"": "cpu"}}, {"device_map": "auto"}], ids=str
    )
    def test_loaders_options_change_nothing(self, good: Path, small: nn.Module, options: dict) -> None:
        if options.get("device_map") == "auto" and torch.cuda.is_available():
            options = {"device_map": {"": "cpu"}}
        assert_same_weights(MiniMaxM1ForCausalLM.from_pretrained(good, **options), small)

    def test_a_state_dict_can_be_given_in_place_of_a_folder(self, good: Path, small: nn.Module) -> None:
        found = MiniMaxM1ForCausalLM.from_pretrained(None, config=small.config, state_dict=weights_in(good))
        assert_same_weights(found, small)

    def test_names_that_the_caller_maps_are_checked_after_loading(
        self, good: Path, small: nn.Module, tmp_path: Path
    ) -> None:
        tensors = {name.replace("model.", "stack.", 1): x for name, x in weights_in(good).items()}
        mapping = {r"^stack\.": "model."}
        save(tmp_path, tensors, config=good)
        found = MiniMaxM1ForCausalLM.from_pretrained(tmp_path, key_mapping=mapping)
        assert_same_weights(found, small)
        del tensors["stack.norm.weight"]
        save(tmp_path, tensors)
        with pytest.raises(ValueError, match=r"'missing': \['model\.norm\.weight'\]"):
            MiniMaxM1ForCausalLM.from_pretrained(tmp_path, key_mapping=mapping)

    def test_a_subfolder_is_checked_where_it_lies(self, good: Path, small: nn.Module) -> None:
        assert_same_weights(MiniMaxM1ForCausalLM.from_pretrained(good.parent, subfolder=good.name), small)

    @pytest.mark.slow
    def test_loading_holds_the_model_once(self, tmp_path: Path) -> None:
        program = (
            "import re, sys, threading, time, torch\n"
            "from minimax_hybrid import MiniMaxM1ForCausalLM\n"
            "def held(): return int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
            "peak, before, done = [0], held(), threading.Event()\n"
            "def watch():\n"
            "    while not done.is_set(): peak[0] = max(peak[0], held()); time.sleep(0.001)\n"
            "thread = threading.Thread(target=watch); thread.start()\n"
            "model = MiniMaxM1ForCausalLM.from_pretrained(sys.argv[1]); done.set(); thread.join()\n"
            "size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1024\n"
            "print((peak[0] - before) / size, size)\n"
        )
        if not Path("/proc/self/status").exists():
            pytest.skip("memory is read from /proc, which this system has not")
        torch.manual_seed(0)
        config = many_experts_config(hidden_size=512, intermediate_size=1024, num_local_experts=16)
        model_on_cpu = MiniMaxM1ForCausalLM(config)
        model_on_cpu.save_pretrained(tmp_path, max_shard_size="50MB")
        del model_on_cpu
        run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        ratio, kilobytes = map(float, run.stdout.split()[-2:])
        assert kilobytes > 280_000
        assert 0.5 < ratio < 1.3, f"peak of {ratio:.2f} times the model"


class TestAutoClasses:
    @pytest.mark.parametrize(
        "model_type, cls",
        [("minimax_m1", MiniMaxM1ForCausalLM), ("minimax_text_01", MiniMaxText01ForCausalLM)],
    )
    def test_auto_classes_load_a_release_without_remote_code(
        self, good: Path, small: nn.Module, tmp_path: Path, model_type: str, cls: type
    ) -> None:
        save(tmp_path, weights_in(good))
        fields = json.loads((good / "config.json").read_text())
        name = "MiniMaxM1" if model_type == "minimax_m1" else "MiniMaxText01"
        fields |= {
            "model_type": model_type,
            "architectures": [f"{name}ForCausalLM"],
            "auto_map": {
                "AutoConfig": f"configuration_{model_type}.{name}Config",
                "AutoModelForCausalLM": f"modeling_{model_type}.{name}ForCausalLM",
            },
        }
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert type(AutoConfig.from_pretrained(tmp_path)) is cls.config_class
        found = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(found) is cls
        assert_same_weights(found, small)
        assert_same_weights(AutoModel.from_pretrained(tmp_path), small.model)
        assert_same_weights(MiniMaxM1ForCausalLM.from_pretrained(tmp_path), small)
        found.save_pretrained(tmp_path / "again")
        written = json.loads((tmp_path / "again" / "config.json").read_text())
        assert written["architectures"] == [f"{name}ForCausalLM"] and written["model_type"] == model_type
        assert "auto_map" not in written

    def test_both_spellings_of_the_config_give_the_same_logits(self, good: Path, tmp_path: Path) -> None:
        save(tmp_path, weights_in(good))
        ours = MiniMaxM1ForCausalLM.from_pretrained(good).eval()
        ids = torch.arange(20)[None] % 61
        for architecture in ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"):
            fields = to_transformers(ours.config) | {"architectures": [architecture]}
            (tmp_path / "config.json").write_text(json.dumps(fields))
            theirs = MiniMaxM1ForCausalLM.from_pretrained(tmp_path).eval()
            with torch.no_grad():
                assert torch.equal(theirs(ids).logits, ours(ids).logits)

    def test_a_hub_name_offline_gets_transformers_own_error(self) -> None:
        with pytest.raises(OSError, match="couldn't connect|MiniMaxAI/not-there"):
            MiniMaxM1ForCausalLM.from_pretrained("MiniMaxAI/not-there", local_files_only=True)

    def test_a_config_of_another_class_is_refused_with_the_way_out(self, good: Path) -> None:
        with pytest.raises(ValueError, match=r"MiniMaxConfig.*MiniMaxM1Config.from_dict"):
            MiniMaxM1ForCausalLM.from_pretrained(good, config=MiniMaxConfig())


class TestOtherShapesOfCheckpoint:
    @pytest.mark.parametrize("original_format", [True, False], ids=["original", "stacked"])
    def test_folders_of_transformers_own_class_load(self, tmp_path: Path, original_format: bool) -> None:
        sizes = MiniMaxM1Config.tiny(num_hidden_layers=4, attn_type_list=[1, 0, 0, 1], num_local_experts=11)
        torch.manual_seed(0)
        theirs = MiniMaxForCausalLM(MiniMaxConfig.from_dict(to_transformers(sizes)))
        theirs.save_pretrained(tmp_path, save_original_format=original_format)
        ours, info = MiniMaxM1ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values())
        state = theirs.state_dict()
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, state[name.replace("block_sparse_moe", "mlp")]), name
        ours.save_pretrained(tmp_path / "ours")
        assert weights_in(tmp_path / "ours").keys() == published_shapes(ours).keys()

    def test_stacked_experts_under_released_module_names_load(
        self, small: nn.Module, good: Path, tmp_path: Path
    ) -> None:
        save(tmp_path, {name: tensor.clone() for name, tensor in small.state_dict().items()}, config=good)
        assert_same_weights(MiniMaxM1ForCausalLM.from_pretrained(tmp_path), small)

    def test_the_stack_loads_from_a_whole_model_and_from_its_own_folder(
        self, good: Path, small: nn.Module, tmp_path: Path
    ) -> None:
        stack, info = MiniMaxM1Model.from_pretrained(good, output_loading_info=True)
        assert_same_weights(stack, small.model)
        assert not any(info.values())
        stack.save_pretrained(tmp_path)
        assert "layers.0.input_layernorm.weight" in weights_in(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["MiniMaxM1Model"]
        assert_same_weights(MiniMaxM1Model.from_pretrained(tmp_path), small.model)

    def test_a_whole_model_from_the_stacks_folder_lacks_its_head_and_nothing_else(
        self, small: nn.Module, tmp_path: Path
    ) -> None:
        small.model.save_pretrained(tmp_path)
        with pytest.raises(ValueError) as refusal:
            MiniMaxM1ForCausalLM.from_pretrained(tmp_path)
        assert str(refusal.value).count("missing:") == 1 and "lm_head.weight" in str(refusal.value)
        with pytest.warns(UserWarning, match=r"lm_head\.weight"):
            found, info = MiniMaxM1ForCausalLM.from_pretrained(
                tmp_path, strict=False, output_loading_info=True
            )
        assert info["missing_keys"] == {"lm_head.weight"}
        assert_same_weights(found.model, small.model)
        assert 0.01 < found.lm_head.weight.std() < 0.03

    @pytest.mark.parametrize("stored", [("embed",), ("head",), ("embed", "head")], ids=str)
    def test_a_tied_head_may_be_in_the_file_or_not(self, tmp_path: Path, stored: tuple[str, ...]) -> None:
        tied = many_experts(tie_word_embeddings=True)
        tied.save_pretrained(tmp_path)
        tensors = weights_in(tmp_path)
        assert "lm_head.weight" not in tensors
        names = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
        table = tensors.pop(names["embed"])
        save(tmp_path, tensors | {names[place]: table.clone() for place in stored})
        found = MiniMaxM1ForCausalLM.from_pretrained(tmp_path)
        assert_same_weights(found, tied)
        assert found.lm_head.weight is found.model.embed_tokens.weight

    def test_an_untied_head_must_be_in_the_file(self, tmp_path: Path) -> None:
        many_experts(tie_word_embeddings=True).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
            MiniMaxM1ForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)

    def test_an_adapter_folder_loads_its_base_and_itself(self, good: Path, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        names = ["qkv_proj", "q_proj", "o_proj", "out_proj", "output_gate"]
        torch.manual_seed(1)
        base = MiniMaxM1ForCausalLM.from_pretrained(good)
        tuned = peft.get_peft_model(
            base, peft.LoraConfig(target_modules=names, r=4, init_lora_weights=False, task_type="CAUSAL_LM")
        )
        tuned.save_pretrained(tmp_path)
        ids = torch.arange(12)[None]
        with torch.no_grad():
            expected = tuned.eval()(ids).logits
            for load in (MiniMaxM1ForCausalLM, AutoModelForCausalLM):
                found = load.from_pretrained(tmp_path).eval()
                torch.testing.assert_close(found(ids).logits, expected, rtol=0, atol=1e-6)
        plain = MiniMaxM1ForCausalLM.from_pretrained(good).eval()
        with torch.no_grad():
            assert (plain(ids).logits - expected).abs().max() > 1e-3


def test_the_full_model_would_write_the_published_tensors() -> None:
    expected = json.loads((GOLDENS / "checkpoint_names.json").read_text())
    model = model_on_meta(MiniMaxM1ForCausalLM, MiniMaxM1Config.m1())
    assert sum(parameter.numel() for parameter in model.parameters()) == 456_089_655_296
    assert expected["parameters"]["total"] == 456_089_655_296
    counts, parameters, shapes = Counter(), Counter(), {}
    for name, shape in published_shapes(model).items():
        words = name.split(".")
        for i, word in enumerate(words):
            if word.isdigit():
                words[i] = "{i}" if words[i - 1] == "layers" else "{e}"
        pattern = ".".join(words)
        counts[pattern] += 1
        parameters[pattern] += torch.Size(shape).numel()
        assert shapes.setdefault(pattern, shape) == shape
    found = {
        name: {"count": counts[name], "shape_from_config": list(shapes[name]), "parameters": parameters[name]}
        for name in counts
    }
    assert found == expected["patterns"]
    assert counts.total() == expected["num_tensors"]


def test_the_folder_may_be_given_by_keyword(good: Path, small: nn.Module) -> None:
    assert_same_weights(MiniMaxM1ForCausalLM.from_pretrained(pretrained_model_name_or_path=good), small)


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (MiniMaxM1ForCausalLM, PreTrainedModel, ["from_pretrained", "save_pretrained"]),
        (MiniMaxM1ForCausalLM, GenerationMixin, ["generate", "_prepare_cache_for_generation"]),
        (MiniMaxM1Config, PreTrainedConfig, ["from_dict", "get_config_dict"]),
    ],
)
def test_overrides_keep_the_parent_s_parameters(ours, theirs, names):
    """Positional parameters have the parent's names and order; what is not named is passed on."""
    for name in names:
        mine, parent = (
            list(inspect.signature(getattr(kind, name)).parameters.values()) for kind in (ours, theirs)
        )
        kinds = {parameter.kind for parameter in mine}
        own = [p.name for p in mine if p.kind is p.POSITIONAL_OR_KEYWORD]
        wanted = [p.name for p in parent if p.kind is p.POSITIONAL_OR_KEYWORD]
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            assert own == wanted[: len(own)] != [], name
        else:
            assert own[: len(wanted)] == wanted, name
        if any(p.kind is p.VAR_KEYWORD for p in parent):
            assert inspect.Parameter.VAR_KEYWORD in kinds, name
