"""The configuration: two spellings of one model, contradictions, and values that no model has."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from minimax_hybrid import MiniMaxM1Config, MiniMaxText01Config
from minimax_hybrid.config import to_transformers

ALPHA = 3.5565588200778455
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=3,
    rotary_dim=4,
    postnorm=True,
)
RELEASE = SIZES | dict(
    model_type="minimax_m1",
    attn_type_list=[1, 0, 0, 1],
    rope_theta=1e7,
    layernorm_full_attention_alpha=ALPHA,
    layernorm_full_attention_beta=0.9,
    layernorm_linear_attention_alpha=1.7,
    layernorm_linear_attention_beta=0.8,
    layernorm_mlp_alpha=1.2,
    layernorm_mlp_beta=1.3,
)
TRANSFORMERS = SIZES | dict(
    model_type="minimax",
    layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
    rope_parameters={"rope_type": "default", "rope_theta": 1e7},
    full_attn_alpha_factor=ALPHA,
    full_attn_beta_factor=0.9,
    linear_attn_alpha_factor=1.7,
    linear_attn_beta_factor=0.8,
    mlp_alpha_factor=1.2,
    mlp_beta_factor=1.3,
    bos_token_id=None,
    eos_token_id=None,
)


def read(folder: Path, fields: dict[str, Any], **changes: Any) -> MiniMaxM1Config:
    """The configuration that a `config.json` with these fields gives."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return MiniMaxM1Config.from_pretrained(folder, **changes)


def fields_of(config: MiniMaxM1Config) -> dict[str, Any]:
    fields = config.to_dict()
    for name in ("architectures", "transformers_version", "_name_or_path"):
        fields.pop(name, None)
    return fields


def test_both_spellings_mean_one_configuration(tmp_path: Path) -> None:
    ours, theirs = read(tmp_path / "a", RELEASE), read(tmp_path / "b", TRANSFORMERS)
    assert fields_of(ours) == fields_of(theirs)
    assert ours.layernorm_full_attention_alpha == ours.full_attn_alpha_factor == ALPHA
    assert theirs.attn_type_list == [1, 0, 0, 1]
    assert ours.layer_types == TRANSFORMERS["layer_types"]
    assert theirs.rope_theta == 1e7 and ours.rope_parameters["rope_theta"] == 1e7


@pytest.mark.parametrize("model_type", ["minimax_m1", "minimax_text_01", "minimax"])
def test_our_class_reads_every_published_model_type(tmp_path: Path, model_type: str) -> None:
    spelled = TRANSFORMERS if model_type == "minimax" else RELEASE
    config = read(tmp_path / "a", spelled | {"model_type": model_type})
    assert type(config) is MiniMaxM1Config and config.model_type == "minimax_m1"
    assert fields_of(config) == fields_of(MiniMaxM1Config(**RELEASE))


@pytest.mark.parametrize("cls", [MiniMaxM1Config, MiniMaxText01Config])
def test_auto_config_reads_a_release_with_auto_map_without_asking(tmp_path: Path, cls: type) -> None:
    remote = {"AutoConfig": "configuration_minimax_m1.MiniMaxM1Config"}
    fields = RELEASE | {"model_type": cls.model_type, "auto_map": remote}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is cls
    assert "auto_map" not in config.to_dict()


def test_a_field_left_out_means_what_its_spelling_means(tmp_path: Path) -> None:
    def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in names}

    release = read(tmp_path / "a", without(RELEASE, "postnorm", "num_key_value_heads", "attn_type_list"))
    assert release.postnorm is False  # getattr(config, "postnorm", False) in the released code
    assert release.num_key_value_heads == 4 and release.eos_token_id is None
    left_out = ("postnorm", "num_key_value_heads", "layer_types", "eos_token_id", "bos_token_id")
    fields = without(TRANSFORMERS, *left_out) | {"num_attention_heads": 8}
    theirs = read(tmp_path / "b", fields)
    assert theirs.postnorm is True and theirs.num_key_value_heads == 8
    assert theirs.bos_token_id == 1 and theirs.eos_token_id == 2
    assert theirs.attn_type_list == [1, 0, 1, 0]  # transformers alternates, softmax first
    assert MiniMaxM1Config(num_hidden_layers=16).attn_type_list == [0] * 7 + [1] + [0] * 7 + [1]
    assert MiniMaxM1Config().postnorm is True


def test_the_older_name_of_the_type_is_read_and_the_newer_wins() -> None:
    assert MiniMaxM1Config(torch_dtype="bfloat16").dtype == torch.bfloat16
    assert MiniMaxM1Config(torch_dtype="bfloat16", dtype="float16").dtype == torch.float16
    with pytest.raises(ValueError, match="dtype is 'bf17'"):
        MiniMaxM1Config(torch_dtype="bf17")


def test_factors_left_out_are_one() -> None:
    config = MiniMaxM1Config()
    for kind in ("full_attention", "linear_attention", "mlp"):
        assert getattr(config, f"layernorm_{kind}_alpha") == getattr(config, f"layernorm_{kind}_beta") == 1.0


@pytest.mark.parametrize(
    "change, named",
    [
        ({"layer_types": ["linear_attention"] * 4}, ["attn_type_list", "layer_types"]),
        ({"rope_parameters": {"rope_theta": 1e6}}, ["rope_theta", "1000000.0", "10000000.0"]),
        ({"full_attn_alpha_factor": 1.0}, ["layernorm_full_attention_alpha", "full_attn_alpha_factor"]),
        ({"mlp_beta_factor": 2.0}, ["layernorm_mlp_beta", "mlp_beta_factor", "2.0", "1.3"]),
        ({"num_experts": 5}, ["num_local_experts", "num_experts", "5", "3"]),
        ({"partial_rotary_factor": 1.0}, ["rotary_dim", "partial_rotary_factor", "8", "4"]),
    ],
)
def test_spellings_that_contradict_each_other_are_refused(change: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        MiniMaxM1Config(**RELEASE, **change)
    for word in [*named, "they mean the same: remove one of them"]:
        assert word in str(refusal.value)


def test_spellings_that_agree_are_read() -> None:
    spelled_twice = {name: value for name, value in TRANSFORMERS.items() if name not in SIZES} | RELEASE
    assert fields_of(MiniMaxM1Config(**spelled_twice)) == fields_of(MiniMaxM1Config(**RELEASE))


WRONG = [
    ("attn_type_list", [0, 1], "one entry for each layer"),
    ("attn_type_list", [0, 1, 2, 1], "0 (lightning) or 1 (softmax)"),
    ("layer_types", ["linear_attention", "sliding_attention"] * 2, "a layer is one of"),
    ("num_key_value_heads", 3, "the second must divide the first"),
    ("num_experts_per_tok", 4, "at most num_local_experts = 3"),
    ("rotary_dim", 10, "even and between 0 and head_dim = 8"),
    ("rotary_dim", 3, "even and between 0 and head_dim = 8"),
    ("rotary_dim", "half", "even and between 0 and head_dim = 8"),
    ("hidden_size", "32", "a whole number of at least 1"),
    ("hidden_size", 32.5, "a whole number of at least 1"),
    ("num_hidden_layers", 0, "a whole number of at least 1"),
    ("num_attention_heads", 0, "a whole number of at least 1"),
    ("vocab_size", True, "a whole number of at least 1"),
    ("rms_norm_eps", 0, "a number above 0"),
    ("rms_norm_eps", "1e-5", "a number above 0"),
    ("rope_theta", -1.0, "a number above 0"),
    ("rope_theta", float("nan"), "a number above 0"),
    ("rope_parameters", 5, "a dictionary"),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4}, "only the 'default' rotary embedding"),
    ("layernorm_mlp_alpha", "big", "a finite number"),
    ("layernorm_mlp_alpha", float("inf"), "a finite number"),
    ("router_aux_loss_coef", None, "a finite number"),
    ("router_jitter_noise", 1.5, "from 0 to below 1"),
    ("attention_dropout", -0.1, "from 0 to below 1"),
    ("hidden_act", "gelu_but_wrong", "the releases use 'silu'"),
    ("sliding_window", 4096, "softmax layers see everything"),
    ("shared_intermediate_size", [64], "a whole number of at least 0"),
    ("head_dtype", "int8", "one of ['float32'"),
    ("postnorm", "yes", "true or false"),
    ("dtype", "bf17", "the name of a torch type"),
]


@pytest.mark.parametrize("name, value, rule", WRONG)
def test_a_refusal_names_field_value_and_rule(name: str, value: Any, rule: str) -> None:
    fields = {field: given for field, given in RELEASE.items() if field != "attn_type_list"}
    if name in ("rope_parameters", "rope_scaling"):
        fields.pop("rope_theta")
    with pytest.raises(ValueError) as refusal:
        MiniMaxM1Config(**(fields | {name: value}))
    message = str(refusal.value)
    assert name.removesuffix("_scaling").removesuffix("_parameters") in message
    shown = value[1] if name == "layer_types" else value["rope_type"] if name == "rope_scaling" else value
    assert rule in message
    if name == "attn_type_list" and len(value) == 2:
        shown = "2 entries"
    elif name == "attn_type_list":
        shown = value[2]
    assert str(shown) in message


def test_a_shared_expert_is_mixed_by_sigmoid_only() -> None:
    with pytest.raises(ValueError, match="shared_moe_mode is 'softmax'"):
        MiniMaxM1Config(**RELEASE, shared_intermediate_size=24, shared_moe_mode="softmax")
    MiniMaxM1Config(**RELEASE, shared_intermediate_size=0, shared_moe_mode="softmax")


def test_a_width_that_does_not_divide_is_refused_unless_head_dim_is_given() -> None:
    with pytest.raises(ValueError, match="hidden_size is 30 and num_attention_heads 4"):
        MiniMaxM1Config(hidden_size=30, num_attention_heads=4)
    assert MiniMaxM1Config(hidden_size=30, num_attention_heads=4, head_dim=8).rotary_dim == 8


factors = st.floats(0.01, 10)
shapes = st.fixed_dictionaries(
    {
        "attn_type_list": st.lists(st.integers(0, 1), min_size=1, max_size=9),
        "num_key_value_heads": st.sampled_from([1, 2, 3, 6]),
        "rotary_dim": st.sampled_from([0, 2, 8, 16]),
        "rope_theta": st.floats(1, 1e8),
        "layernorm_mlp_beta": factors,
        "layernorm_full_attention_alpha": factors,
        "layernorm_linear_attention_alpha": factors,
        "postnorm": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "eos_token_id": st.none() | st.integers(0, 63) | st.lists(st.integers(0, 63), min_size=1, max_size=3),
        "head_dtype": st.sampled_from(["float32", "bfloat16"]),
        "my_own_field": st.none() | st.text(max_size=5) | st.lists(st.integers(), max_size=3),
    }
)


@given(fields=shapes)
def test_saving_and_loading_keeps_every_value(fields: dict[str, Any], tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("config")
    layers = len(fields["attn_type_list"])
    config = MiniMaxM1Config(num_attention_heads=6, head_dim=16, num_hidden_layers=layers, **fields)
    config.architectures = ["MiniMaxM1Model"]
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["attn_type_list"] == fields["attn_type_list"]
    assert written["rope_theta"] == fields["rope_theta"]
    assert "layer_types" not in written and "rope_parameters" not in written
    for again in (MiniMaxM1Config.from_pretrained(folder), AutoConfig.from_pretrained(folder)):
        assert fields_of(again) == fields_of(config)
        assert again.architectures == ["MiniMaxM1Model"]
        assert again.my_own_field == fields["my_own_field"]


@given(fields=shapes)
def test_the_other_spelling_and_back_keeps_every_value(fields: dict[str, Any], tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("config")
    layers = len(fields["attn_type_list"])
    config = MiniMaxM1Config(num_attention_heads=6, head_dim=16, num_hidden_layers=layers, **fields)
    theirs = to_transformers(config)
    assert theirs["model_type"] == "minimax" and "attn_type_list" not in theirs
    assert fields_of(read(folder, json.loads(json.dumps(theirs)))) == fields_of(config)


def test_transformers_own_class_reads_what_we_spell_its_way(tmp_path: Path) -> None:
    config = MiniMaxM1Config(**RELEASE)
    (tmp_path / "config.json").write_text(json.dumps(to_transformers(config)))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "MiniMaxConfig"
    for name in ("layer_types", "full_attn_alpha_factor", "mlp_beta_factor", "num_key_value_heads"):
        assert getattr(theirs, name) == getattr(config, name)
    assert theirs.rope_parameters["rope_theta"] == 1e7
    assert theirs.bos_token_id is None and theirs.eos_token_id is None


def test_fields_given_while_reading_replace_the_files_and_are_checked(tmp_path: Path) -> None:
    assert read(tmp_path, RELEASE, head_dtype="bfloat16").head_dtype == "bfloat16"
    assert read(tmp_path, RELEASE, full_attn_alpha_factor=2.0).layernorm_full_attention_alpha == 2.0
    assert read(tmp_path, RELEASE, layer_types=["full_attention"] * 4).attn_type_list == [1] * 4
    assert read(tmp_path, TRANSFORMERS, rope_theta=5e5).rope_theta == 5e5
    with pytest.raises(ValueError, match="rotary_dim is 7"):
        read(tmp_path, RELEASE, rotary_dim=7)
    config, unused = read(tmp_path, RELEASE, return_unused_kwargs=True, rotary_dim=8, something=1)
    assert config.rotary_dim == 8 and unused == {"something": 1}


def test_copies_and_pickles_are_equal_and_independent() -> None:
    config = MiniMaxM1Config(**RELEASE, my_own_field={"a": [1]})
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin.to_dict() == config.to_dict() and twin.layer_types == config.layer_types
        twin.attn_type_list[0] = 0
        assert config.attn_type_list[0] == 1


def test_the_named_sizes_are_the_releases_shape() -> None:
    full = MiniMaxM1Config.m1()
    reference = [0] * 7 + [1]
    assert full.attn_type_list == reference * 10
    assert full.layernorm_mlp_alpha == pytest.approx(ALPHA)
    assert MiniMaxM1Config.tiny(vocab_size=7).vocab_size == 7
    assert MiniMaxM1Config.tiny().attn_type_list == reference


def test_rope_parameters_can_be_set_on_a_built_config():
    config = MiniMaxM1Config.tiny()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    assert (config.rope_theta, config.rotary_dim) == (500.0, 8)
    config.rope_parameters = {"rope_type": "default"}
    assert (config.rope_theta, config.rotary_dim) == (500.0, 8)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type is 'yarn'"),
        ({"rope_type": "linear", "factor": 4.0}, "rope_type is 'linear'"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta is -1.0"),
        ("default", "must be a dictionary"),
    ],
    ids=str,
)
def test_rope_parameters_that_are_not_supported_are_refused_when_set(parameters, words):
    config = MiniMaxM1Config.tiny()
    with pytest.raises(ValueError, match=words):
        config.rope_parameters = parameters
    assert config.rope_theta == 1e7 and config.rotary_dim == 16
