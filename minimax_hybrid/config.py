"""The configuration of a hybrid lightning-attention model, read from either published spelling.

Two spellings exist for the same model: the release's (`minimax_m1`, `minimax_text_01`: `attn_type_list`,
`layernorm_*_alpha`, `rope_theta`) and transformers' (`minimax`: `layer_types`, `*_alpha_factor`,
`rope_parameters`). Both are read; the release's is kept and written, since the serving engines read that one.
"""

from typing import Any

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
        postnorm: whether the residual is the normed input (both releases) or the input itself.
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
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attn_type_list: list[int] | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rotary_dim: int | None = None
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0
    shared_intermediate_size: int = 0
    shared_moe_mode: str = "sigmoid"
    postnorm: bool = True
    layernorm_full_attention_alpha: float | None = None
    layernorm_full_attention_beta: float | None = None
    layernorm_linear_attention_alpha: float | None = None
    layernorm_linear_attention_beta: float | None = None
    layernorm_mlp_alpha: float | None = None
    layernorm_mlp_beta: float | None = None
    head_dtype: str = "float32"

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # names the remote code that this package replaces
        self._read_layers(kwargs, spelling=kwargs.pop("model_type", None))
        self._read_factors(kwargs)
        self._read_rotary(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._check()
        super().__post_init__(**kwargs)

    @classmethod
    def tiny(cls, **changes: Any) -> "MiniMaxM1Config":
        """A model of the real shape that a CPU runs in milliseconds: 8 layers, the last one softmax."""
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

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Nothing to convert: `rope_theta` is already read (the base class would store a second copy)."""
        return kwargs

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The raw dictionary, with the model type of any spelling we read turned into this class's own."""
        config, kwargs = super().get_config_dict(*args, **kwargs)
        spelling = config.get("model_type")
        if spelling == "minimax" and not {"layer_types", "attn_type_list"} & set(config):
            config["layer_types"] = _alternating(config.get("num_hidden_layers", cls.num_hidden_layers))
        if spelling in ("minimax", "minimax_m1", "minimax_text_01"):
            config["model_type"] = cls.model_type
        return config, kwargs

    def _read_layers(self, kwargs: dict[str, Any], *, spelling: str | None) -> None:
        layer_types = kwargs.pop("layer_types", None)
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
                f"attn_type_list (or layer_types) has {len(self.attn_type_list)} entries and num_hidden_layers "
                f"is {self.num_hidden_layers}; give one entry for each layer"
            )
        for i, kind in enumerate(self.attn_type_list):
            if kind not in (LIGHTNING, SOFTMAX):
                raise ValueError(f"attn_type_list[{i}] is {kind!r}; a layer is 0 (lightning) or 1 (softmax)")

    def _read_factors(self, kwargs: dict[str, Any]) -> None:
        for theirs, ours in _ALPHA_BETA.items():
            value = _agree(ours, getattr(self, ours), theirs, kwargs.pop(theirs, None))
            setattr(self, ours, 1.0 if value is None else float(value))

    def _read_rotary(self, kwargs: dict[str, Any]) -> None:
        parameters = dict(kwargs.pop("rope_parameters", None) or {})
        scaling = kwargs.pop("rope_scaling", None) or {}
        kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
        if kind != "default":
            raise ValueError(f"rope_type is {kind!r}; only the 'default' rotary embedding is implemented")
        theta = _agree(
            "rope_theta", self.rope_theta, "rope_parameters['rope_theta']", parameters.get("rope_theta")
        )
        self.rope_theta = _DEFAULT_THETA if theta is None else theta
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
        for name in (
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
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        _divides(
            "num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads
        )
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok} and num_local_experts "
                f"{self.num_local_experts}; a token cannot go to more experts than there are"
            )
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}; it must be even and between 0 and head_dim "
                f"= {self.head_dim}"
            )
        if not self.rms_norm_eps > 0:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps!r}; it must be above 0")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta is {self.rope_theta!r}; it must be above 0")
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}; the releases use 'silu', known are {sorted(ACT2FN)}"
            )
        if self.sliding_window is not None:
            raise ValueError(
                f"sliding_window is {self.sliding_window!r}; softmax layers see everything: set it to null"
            )
        if self.shared_intermediate_size > 0 and self.shared_moe_mode != "sigmoid":
            raise ValueError(
                f"shared_moe_mode is {self.shared_moe_mode!r}; a shared expert is mixed by 'sigmoid'"
            )
        if self.head_dtype not in _HEAD_DTYPES:
            raise ValueError(f"head_dtype is {self.head_dtype!r}; choose one of {list(_HEAD_DTYPES)}")


class MiniMaxText01Config(MiniMaxM1Config):
    """The same model under the name of the earlier release, MiniMax-Text-01."""

    model_type = "minimax_text_01"


def to_transformers(config: MiniMaxM1Config) -> dict[str, Any]:
    """The same configuration in transformers' own spelling (`minimax`), as a `config.json` dictionary."""
    theirs = config.to_diff_dict()
    for name in ("attn_type_list", "rope_theta", *_ALPHA_BETA.values()):
        theirs.pop(name, None)
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


def _agree(ours: str, value: Any, theirs: str, other: Any) -> Any:
    """The value of a field that has two spellings, or a ValueError where they contradict each other."""
    if value is not None and other is not None and value != other:
        raise ValueError(
            f"{ours} is {value!r} and {theirs} is {other!r}; they mean the same: remove one of them"
        )
    return other if value is None else value


def _divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} is {value} and {divisor_name} {divisor}; the second must divide the first")
