"""What a model costs, from its configuration alone: parameters, FLOPs and bytes.

Conventions (those of the released model's published counts):
one multiply-add is 2 FLOPs; matrix products only (no norms, rotary, activations, softmax, decay multiplies);
"decode" counts one new token that attends `length` keys, itself included; "prefill" is the mean over a causal
prefill of `length` tokens, so a query attends (length + 1) / 2 keys; "training" is three times that.
A lightning layer costs 4 H D^2 a token for its state and, in prefill, 4 C H D for the unmasked C x C block.

    parameters(config).total, .active, .components
    flops(config, length, "prefill").total, .components
    cache_bytes(config, length).keys_values, .state, .total, .open_block
    softmax_twin(config)                    the same widths, every layer softmax
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch

from minimax_kernels import BLOCK

from ..config import LIGHTNING, SOFTMAX, MiniMaxM1Config

Mode = Literal["prefill", "decode", "training"]


@dataclass(frozen=True)
class Parameters:
    """Weights by component. A tied table is counted once, as `lm_head`."""

    components: dict[str, int]
    active_components: dict[str, int]  # those one token meets: A of the E experts, all of the rest

    @property
    def total(self) -> int:
        return sum(self.components.values())

    @property
    def active(self) -> int:
        """Without embedding and head, as the M1 report counts ("45.9B")."""
        tables = self.active_components["embed_tokens"] + self.active_components["lm_head"]
        return self.active_with_embedding - tables

    @property
    def active_with_head(self) -> int:
        return self.active_with_embedding - self.active_components["embed_tokens"]

    @property
    def active_with_embedding(self) -> int:
        return sum(self.active_components.values())


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token by component."""

    components: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.components.values())

    @property
    def total_without_lm_head(self) -> int:
        return self.total - self.components["lm_head"]


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that one sequence keeps between two steps; `total` leaves the bounded open block out."""

    keys_values: int
    state: int
    open_block: int

    @property
    def total(self) -> int:
        return self.keys_values + self.state


@dataclass(frozen=True)
class BreakEven:
    """Tokens from which a lightning layer is cheaper than a softmax layer with bfloat16 keys and values."""

    memory: float
    decode_flops: float


def layer_parameters(config: MiniMaxM1Config) -> dict[str, dict[str, int]]:
    """Weights of one layer of each kind ("lightning", "softmax") and of what every layer has ("every")."""
    M, F, E = config.hidden_size, config.intermediate_size, config.num_local_experts
    HD, HkvD = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    every = {"moe_experts": E * 3 * M * F, "moe_router": M * E, "block_rmsnorms": 2 * M}
    if config.shared_intermediate_size > 0:
        every["moe_shared_expert"] = 3 * M * F + M  # the released code gives it the routed experts' width
    return {
        "lightning": {
            "lightning_qkv_proj": M * 3 * HD,
            "lightning_output_gate": M * HD,
            "lightning_out_proj": HD * M,
            "lightning_inner_rmsnorm": HD,
        },
        "softmax": {
            "softmax_q_proj": M * HD,
            "softmax_k_proj": M * HkvD,
            "softmax_v_proj": M * HkvD,
            "softmax_o_proj": HD * M,
        },
        "every": every,
    }


def parameters(config: MiniMaxM1Config) -> Parameters:
    """Weights, total and active, by component."""
    table = config.vocab_size * config.hidden_size
    components = {"embed_tokens": 0 if config.tie_word_embeddings else table, "lm_head": table}
    layers = _layers_of_each_kind(config)
    for kind, weights in layer_parameters(config).items():
        components |= {name: layers[kind] * count for name, count in weights.items()}
    components["final_rmsnorm"] = config.hidden_size
    chosen = components["moe_experts"] * config.num_experts_per_tok // config.num_local_experts
    return Parameters(components, components | {"moe_experts": chosen})


def flops(config: MiniMaxM1Config, length: int, mode: Mode, *, block: int = 256) -> Flops:
    """FLOPs per token at `length` tokens; `block` is the C of the lightning layers' prefill."""
    if mode not in ("prefill", "decode", "training"):
        raise ValueError(f"mode is {mode!r}; choose 'prefill', 'decode' or 'training'")
    if length < 1 or block < 1:
        raise ValueError(f"length is {length} and block {block}; both count tokens and are at least 1")
    layers, active = _layers_of_each_kind(config), parameters(config).active_components
    HD = config.num_attention_heads * config.head_dim
    state = layers["lightning"] * 2 * HD * config.head_dim
    # 2 H D for each key that is attended: `length` of them, or (length + 1) / 2 on average
    scores = layers["softmax"] * HD * (2 * length if mode == "decode" else length + 1)
    components = {
        "lightning_projections": 2 * _sum(active, "lightning", "proj", "gate"),
        "lightning_state_update": state,
        "lightning_state_readout": state,
        "lightning_intra_chunk": 0 if mode == "decode" else layers["lightning"] * 4 * min(block, length) * HD,
        "softmax_projections": 2 * _sum(active, "softmax", "proj"),
        "softmax_qk": scores,
        "softmax_pv": scores,
        "moe_experts": 2 * active["moe_experts"],
        "moe_router": 2 * active["moe_router"],
        "lm_head": 2 * active["lm_head"],
        "embed_tokens": 0,
    }
    if "moe_shared_expert" in active:
        components["moe_shared_expert"] = 2 * active["moe_shared_expert"]
    passes = 3 if mode == "training" else 1  # backward is two products for each one of the forward
    return Flops({name: passes * count for name, count in components.items()})


def generation_flops(config: MiniMaxM1Config, T: int) -> int:
    """Exact FLOPs of generating T tokens, the sum of T decode steps."""
    mean = flops(config, T, "prefill")
    return T * (mean.total - mean.components["lightning_intra_chunk"])


def cache_bytes(config: MiniMaxM1Config, length: int, *, dtype: str = "bfloat16") -> CacheBytes:
    """Bytes of one sequence's cache: keys and values in `dtype`, lightning states in float32.

    The open block (keys and values of at most `BLOCK` positions per lightning layer, in `dtype`) does not
    grow with the length and is reported apart.
    """
    layers, D = _layers_of_each_kind(config), config.head_dim
    head = 2 * D * itemsize(dtype)  # a position's key and value in one head
    return CacheBytes(
        keys_values=layers["softmax"] * config.num_key_value_heads * head * length,
        state=layers["lightning"] * config.num_attention_heads * D * D * 4,
        open_block=layers["lightning"] * config.num_attention_heads * head * BLOCK,
    )


def weight_bytes(config: MiniMaxM1Config, dtype: str = "bfloat16", *, router_dtype: str | None = None) -> int:
    """Bytes of all weights in `dtype`; the released checkpoint is bfloat16 with `router_dtype="float32"`."""
    counts = parameters(config)
    router = counts.components["moe_router"]
    return (counts.total - router) * itemsize(dtype) + router * itemsize(router_dtype or dtype)


def inference_bytes(
    config: MiniMaxM1Config, length: int, *, dtype: str = "bfloat16", sequences: int = 1
) -> int:
    """Bytes that generation needs at `length` tokens: weights and caches, open blocks included."""
    cache = cache_bytes(config, length, dtype=dtype)
    return weight_bytes(config, dtype) + sequences * (cache.total + cache.open_block)


def softmax_twin(config: MiniMaxM1Config) -> MiniMaxM1Config:
    """The same widths with softmax attention in every layer."""
    twin = copy.deepcopy(config)
    twin.attn_type_list = [SOFTMAX] * config.num_hidden_layers
    return twin


def break_even(config: MiniMaxM1Config) -> BreakEven:
    """Where one lightning layer's state and decode step become cheaper than one softmax layer's."""
    H, Hkv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    weights = layer_parameters(config)
    lightning = 2 * (sum(weights["lightning"].values()) - H * D) + 4 * H * D * D
    softmax = 2 * sum(weights["softmax"].values())
    return BreakEven(
        memory=4 * H * D * D / (2 * Hkv * D * itemsize("bfloat16")),
        decode_flops=(lightning - softmax) / (4 * H * D),
    )


def itemsize(dtype: str) -> int:
    """Bytes of one number of a torch type, by its name."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; use the name of a torch type such as 'bfloat16'")
    return kind.itemsize


def _layers_of_each_kind(config: MiniMaxM1Config) -> dict[str, int]:
    kinds = config.attn_type_list
    return {"lightning": kinds.count(LIGHTNING), "softmax": kinds.count(SOFTMAX), "every": len(kinds)}


def _sum(counts: dict[str, int], prefix: str, *suffixes: str) -> int:
    return sum(n for name, n in counts.items() if name.startswith(prefix) and name.endswith(suffixes))
