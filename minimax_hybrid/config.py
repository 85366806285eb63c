"""The configuration of a hybrid lightning-attention model, read from either published spelling.

Two spellings exist for the same model: the release's (`minimax_m1`, `minimax_text_01`: `attn_type_list`,
`layernorm_*_alpha`, `rope_theta`) and transformers' (`minimax`: `layer_types`, `*_alpha_factor`,
`rope_parameters`). Both are read; the release's is kept and written, since the serving engines read that one.
"""

import copy
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

LIGHTNING, SOFTMAX = 0, 1  # entries of attn_type_list
_KINDS = {"linear_attention": LIGHTNING, "full_attention": SOFTMAX}
_ALPHA_BETA = {
    f"{kind_hf}_{factor}_factor": f"layernorm_{kind}_{factor}"
    for kind_hf, kind in (
        ("full_attn", "full_attention"),
        ("linear_attn", "linear_attention"),
        ("mlp", "mlp"),
    )
    for factor in ("alpha", "beta")
}
_HEAD_DTYPES = ("float32", "float64", "bfloat16", "float16")
_DEFAULT_THETA = 1e6
_RELEASES = ("minimax_m1", "minimax_text_01")
# what transformers' `minimax` means by leaving a field out, where the release means something else
_MINIMAX_DEFAULTS = {"num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2, "postnorm": True}
_TWO_NAMES = {
    "attn_type_list": "layer_types",
    "rope_theta": "rope_parameters",
    "num_local_experts": "num_experts",
}
_TWO_NAMES |= {ours: theirs for theirs, ours in _ALPHA_BETA.items()}
_TWO_NAMES |= {theirs: ours for ours, theirs in _TWO_NAMES.items()}
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)


_LATER: Any = None  # the default of a field that `__post_init__` fills in where the caller did not


class MiniMaxM1Config(PreTrainedConfig):
    """Sizes and constants of the model; field names are the release's.

    A field given in both spellings with different values is a `ValueError`, and so is every value that the
    model could not be built from. `tiny()` and `m1()` are the sizes most often wanted.

    Args (beyond the widths and counts that name themselves):
        attn_type_list: one entry a layer, 0 lightning or 1 softmax; by default seven lightning, then one
            softmax.
        layernorm_{full_attention, linear_attention, mlp}_{alpha, beta}: factors of residual and branch (1 if
            absent).
        rotary_dim: leading dimensions of a head that rotate; all of `head_dim` if None.
        postnorm: whether the residual is the normed input (both releases) or the input itself. A release's
            `config.json` without it means False, as the released code does.
        shared_intermediate_size: above 0, every layer has a shared expert besides the routed ones.
        head_dtype: type in which the output head computes and returns logits; the weight keeps its own.
    """

    model_type = "minimax_m1"
    attribute_map = {"num_experts": "num_local_experts", **_ALPHA_BETA}
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = _LATER
    head_dim: int = _LATER
    attn_type_list: list[int] = _LATER
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_theta: float = _LATER
    rotary_dim: int = _LATER
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    num_experts_per_tok: int = 2
    num_local_experts: int = _LATER
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0
    shared_intermediate_size: int = 0
    shared_moe_mode: str = "sigmoid"
    postnorm: bool = _LATER
    layernorm_full_attention_alpha: float = _LATER
    layernorm_full_attention_beta: float = _LATER
    layernorm_linear_attention_alpha: float = _LATER
    layernorm_linear_attention_beta: float = _LATER
    layernorm_mlp_alpha: float = _LATER
    layernorm_mlp_beta: float = _LATER
    head_dtype: str = "float32"

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # names the remote code that this package replaces
        spelling, older = kwargs.pop("model_type", None), kwargs.pop("torch_dtype", None)
        self.dtype = older if self.dtype is None else self.dtype
        self._check_counts("num_hidden_layers", "num_attention_heads")
        self._read_layers(kwargs, spelling=spelling)
        self._read_factors(kwargs)
        self._read_rotary(kwargs)
        experts = kwargs.pop("num_experts", None)
        self.num_local_experts = _agree(
            "num_local_experts", self.num_local_experts, "num_experts", experts, absent=8
        )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.postnorm is None:
            self.postnorm = spelling not in _RELEASES
        self._check()
        super().__post_init__(**kwargs)

    @classmethod
    def tiny(cls, **changes: Any) -> "MiniMaxM1Config":
        """A model of the released shape that a CPU runs in milliseconds: 8 layers, the last one softmax."""
        sizes = dict(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rotary_dim=16,
            num_local_experts=4,
            max_position_embeddings=4096,
            rope_theta=1e7,
            **_deepnorm(8),
        )
        return cls(**{**sizes, **changes})

    @classmethod
    def m1(cls, **changes: Any) -> "MiniMaxM1Config":
        """MiniMax-M1 as released: 456B parameters, 45.9B active."""
        sizes = dict(
            vocab_size=200064,
            hidden_size=6144,
            intermediate_size=9216,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            rotary_dim=64,
            num_local_experts=32,
            max_position_embeddings=10_240_000,
            rope_theta=1e7,
            **_deepnorm(80),
        )
        return cls(**{**sizes, **changes})

    @property
    def layer_types(self) -> list[str]:
        """transformers' spelling of `attn_type_list`."""
        names = {number: name for name, number in _KINDS.items()}
        return [names[kind] for kind in self.attn_type_list]

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """transformers' spelling of `rope_theta`."""
        return {"rope_type": "default", "rope_theta": self.rope_theta}

    @rope_parameters.setter
    def rope_parameters(self, parameters: dict[str, Any]) -> None:
        """Takes effect for models that are built from now on; what the dictionary leaves out stays."""
        changed = copy.copy(self)
        if isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
            changed.rope_theta = _LATER
        if isinstance(parameters, dict) and parameters.get("partial_rotary_factor") is not None:
            changed.rotary_dim = _LATER
        changed._read_rotary({"rope_parameters": parameters})
        changed._check()
        self.rope_theta, self.rotary_dim = changed.rope_theta, changed.rotary_dim

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Nothing to convert: `rope_theta` is already read (the base class would store a second copy)."""
        return kwargs

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The raw dictionary, with the model type of any spelling we read turned into this class's own."""
        try:
            config, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        except (AttributeError, TypeError) as error:
            where = pretrained_model_name_or_path
            raise ValueError(f"config.json is not a JSON object ({error}), in {where}") from error
        return cls._own_type(config), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "MiniMaxM1Config":
        """A configuration from a `config.json` of any spelling.

        Fields among `kwargs` replace its own and are checked with the rest.
        """
        config = cls._own_type(dict(config_dict))
        for name in [name for name in kwargs if name in cls.__dataclass_fields__ or name in _TWO_NAMES]:
            if name not in ("dtype", "torch_dtype"):
                config.pop(_TWO_NAMES.get(name, name), None)
                config[name] = kwargs.pop(name)
        return super().from_dict(config, **kwargs)

    @classmethod
    def _own_type(cls, config: dict[str, Any]) -> dict[str, Any]:
        if config.get("model_type") == "minimax":
            config = {**_MINIMAX_DEFAULTS, **config}
            if not {"layer_types", "attn_type_list"} & set(config):
                config["layer_types"] = _alternating(config.get("num_hidden_layers", cls.num_hidden_layers))
        if config.get("model_type") in ("minimax", *_RELEASES):
            config["model_type"] = cls.model_type
        return config

    def _read_layers(self, kwargs: dict[str, Any], *, spelling: str | None) -> None:
        layer_types = kwargs.pop("layer_types", None)
        if self.attn_type_list is not None:
            self.attn_type_list = list(self.attn_type_list)
        if spelling == "minimax" and layer_types is None and self.attn_type_list is None:
            layer_types = _alternating(self.num_hidden_layers)
        if layer_types is not None:
            for i, kind in enumerate(layer_types):
                if kind not in _KINDS:
                    raise ValueError(f"layer_types[{i}] is {kind!r}; a layer is one of {sorted(_KINDS)}")
            self.attn_type_list = _agree(
                "attn_type_list", self.attn_type_list, "layer_types", [_KINDS[kind] for kind in layer_types]
            )
        if self.attn_type_list is None:
            self.attn_type_list = [
                SOFTMAX if i % 8 == 7 else LIGHTNING for i in range(self.num_hidden_layers)
            ]
        if len(self.attn_type_list) != self.num_hidden_layers:
            raise ValueError(
                f"attn_type_list (or layer_types) has {len(self.attn_type_list)} entries and "
                f"num_hidden_layers is {self.num_hidden_layers}; give one entry for each layer"
            )
        for i, kind in enumerate(self.attn_type_list):
            if kind not in (LIGHTNING, SOFTMAX):
                raise ValueError(f"attn_type_list[{i}] is {kind!r}; a layer is 0 (lightning) or 1 (softmax)")

    def _read_factors(self, kwargs: dict[str, Any]) -> None:
        for kind in ("alpha", "beta"):
            names = {ours: theirs for theirs, ours in _ALPHA_BETA.items() if ours.endswith(kind)}
            absent = [n for n, t in names.items() if getattr(self, n) is None and kwargs.get(t) is None]
            if 0 < len(absent) < len(names):
                warnings.warn(
                    f"{', '.join(absent)} not given beside the other factors, so taken as 1", stacklevel=4
                )
        for theirs, ours in _ALPHA_BETA.items():
            value = _agree(ours, getattr(self, ours), theirs, kwargs.pop(theirs, None), absent=1.0)
            setattr(self, ours, float(value) if _is_number(value) else value)

    def _read_rotary(self, kwargs: dict[str, Any]) -> None:
        parameters, scaling = (kwargs.pop(name, None) or {} for name in ("rope_parameters", "rope_scaling"))
        for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
            if not isinstance(value, dict):
                raise ValueError(f"{name} is {value!r}; it must be a dictionary with a rope_type")
        kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
        if kind != "default":
            raise ValueError(f"rope_type is {kind!r}; only the 'default' rotary embedding is implemented")
        self.rope_theta = _agree(
            "rope_theta",
            self.rope_theta,
            "rope_parameters['rope_theta']",
            parameters.get("rope_theta"),
            absent=_DEFAULT_THETA,
        )
        if self.head_dim is None:
            _divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
            self.head_dim = self.hidden_size // self.num_attention_heads
        partial = parameters.get("partial_rotary_factor", kwargs.pop("partial_rotary_factor", None))
        if partial is not None:
            width = int(self.head_dim * partial)
            self.rotary_dim = _agree("rotary_dim", self.rotary_dim, "partial_rotary_factor * head_dim", width)
        if self.rotary_dim is None:
            self.rotary_dim = self.head_dim

    def _check(self) -> None:
        self._check_counts(*_COUNTS)
        H, D = self.num_attention_heads, self.head_dim
        _divides("num_attention_heads", H, "num_key_value_heads", self.num_key_value_heads)
        whole = isinstance(self.rotary_dim, int)
        for name, right, rule in (
            (
                "num_experts_per_tok",
                self.num_experts_per_tok <= self.num_local_experts,
                f"at most num_local_experts = {self.num_local_experts}",
            ),
            (
                "rotary_dim",
                whole and 0 <= self.rotary_dim <= D and self.rotary_dim % 2 == 0,
                f"even and between 0 and head_dim = {D}",
            ),
            ("rms_norm_eps", _is_number(self.rms_norm_eps) and self.rms_norm_eps > 0, "a number above 0"),
            ("rope_theta", _is_number(self.rope_theta) and self.rope_theta > 0, "a number above 0"),
            ("hidden_act", self.hidden_act in ACT2FN, f"one of {sorted(ACT2FN)}; the releases use 'silu'"),
            ("sliding_window", self.sliding_window is None, "null: softmax layers see everything"),
            (
                "shared_intermediate_size",
                isinstance(self.shared_intermediate_size, int) and self.shared_intermediate_size >= 0,
                "a whole number of at least 0",
            ),
            (
                "shared_moe_mode",
                self.shared_moe_mode == "sigmoid" or not self.shared_intermediate_size,
                "'sigmoid' where there is a shared expert",
            ),
            ("head_dtype", self.head_dtype in _HEAD_DTYPES, f"one of {list(_HEAD_DTYPES)}"),
            (
                "dtype",
                not isinstance(self.dtype, str) or isinstance(getattr(torch, self.dtype, None), torch.dtype),
                "the name of a torch type, such as 'bfloat16'",
            ),
            *(
                (name, _is_number(getattr(self, name)), "a finite number")
                for name in (*_ALPHA_BETA.values(), "router_aux_loss_coef", "initializer_range")
            ),
            *(
                (name, _is_number(getattr(self, name)) and 0 <= getattr(self, name) < 1, "from 0 to below 1")
                for name in ("router_jitter_noise", "attention_dropout")
            ),
            *(
                (name, isinstance(getattr(self, name), bool), "true or false")
                for name in ("postnorm", "tie_word_embeddings")
            ),
        ):
            if not right:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

    def _check_counts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")


class MiniMaxText01Config(MiniMaxM1Config):
    """The same model under the name of the earlier release, MiniMax-Text-01."""

    model_type = "minimax_text_01"


def read_config(path: str | Path) -> MiniMaxM1Config:
    """The configuration in a checkpoint folder or a config.json.

    Raises:
        ValueError: no such file, no JSON, or another kind of model.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"there is no {path}; give the folder of a checkpoint")
    if not file.is_file():
        raise ValueError(f"{path} holds no config.json; give the folder of a checkpoint")
    try:
        model_type = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no model's configuration ({type(error).__name__}: {error})") from error
    known = (*_RELEASES, "minimax")
    if model_type not in known:
        raise ValueError(
            f"{file} describes a model of type {model_type!r}; this program runs " + ", ".join(known)
        )
    return MiniMaxM1Config.from_pretrained(str(file), local_files_only=True)


def to_transformers(config: MiniMaxM1Config) -> dict[str, Any]:
    """The same configuration in transformers' own spelling (`minimax`), as a `config.json` dictionary."""
    theirs = config.to_diff_dict()
    for name in ("attn_type_list", "rope_theta", *_ALPHA_BETA.values()):
        theirs.pop(name, None)
    # its defaults differ from ours: nothing it reads may be left out
    for name in ("num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id", "pad_token_id"):
        theirs[name] = getattr(config, name)
    theirs |= {name: getattr(config, ours) for name, ours in _ALPHA_BETA.items()}
    return theirs | {
        "model_type": "minimax",
        "architectures": ["MiniMaxForCausalLM"],
        "layer_types": config.layer_types,
        "rope_parameters": config.rope_parameters,
    }


def _alternating(layers: int) -> list[str]:
    """The layers that transformers' `minimax` means by leaving `layer_types` out."""
    return ["linear_attention" if i % 2 else "full_attention" for i in range(layers)]


def _deepnorm(layers: int) -> dict[str, float]:
    """The releases' residual factor (2 L)^(1/4), in every place (M1 report, section 2; DeepNet)."""
    return {name: (2 * layers) ** 0.25 for name in _ALPHA_BETA.values() if name.endswith("_alpha")}


def _agree(ours: str, value: Any, theirs: str, other: Any, *, absent: Any = None) -> Any:
    """The value of a field that has two spellings, or a ValueError where they contradict each other."""
    if value is not None and other is not None and value != other:
        raise ValueError(
            f"{ours} is {value!r} and {theirs} is {other!r}; they mean the same: remove one of them"
        )
    given = other if value is None else value
    return absent if given is None else given


def _divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} is {value} and {divisor_name} {divisor}; the second must divide the first")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
