"""FLOPs of generating T tokens: the curves of the M1 report's Figure 1 (right) beside exact counts.

The figure's markers lie, to their last printed digit, on

    FLOPs(T) = 2 P T + L H (d_qk + 2 d_v) T^2

with P the multiplied weights of one token and L softmax layers of H heads: queries times keys counted
causally (half the square), probabilities times values over the full square, routers left out. Two of the
three P differ further from the models they stand for; `Curve.departs` says where. The exact counts use the
published configurations, routers and head included, and every attention product over the causal half,
T (T + 1) / 2 pairs.
"""

from dataclasses import dataclass

from ..config import MiniMaxM1Config
from .counts import layer_parameters


@dataclass(frozen=True)
class Curve:
    """Generation FLOPs, `linear` T + `quadratic` T^2."""

    name: str
    linear: int
    quadratic: int
    departs: str = ""

    def __call__(self, T: int) -> int:
        return self.linear * T + self.quadratic * T * T


@dataclass(frozen=True)
class Peer:
    """A softmax mixture-of-experts model, as far as counting needs it."""

    name: str
    attention: int  # weights of one layer's attention
    layers: int
    dense_layers: int  # leading layers with one wide feed-forward instead of experts
    dense: int  # weights of such a feed-forward
    experts: int  # weights of the experts that one token meets, shared ones included
    router: int
    head: int
    score_width: int  # H (d_qk + d_v): multiply-adds for one pair of positions

    def __call__(self, T: int) -> int:
        """Exact FLOPs of generating T tokens."""
        expert_layers = self.layers - self.dense_layers
        weights = self.layers * self.attention + self.dense_layers * self.dense
        weights += expert_layers * (self.experts + self.router) + self.head
        return 2 * weights * T + 2 * self.layers * self.score_width * (T * (T + 1) // 2)


def _mla_weights(M: int, H: int, nope: int, rope: int, v: int, q_rank: int, kv_rank: int) -> int:
    queries = M * q_rank + q_rank * H * (nope + rope)
    return queries + M * (kv_rank + rope) + kv_rank * H * (nope + v) + H * v * M


def _deepseek_r1(*, absorbed: bool) -> Peer:
    M, H, nope, rope, v, kv_rank = 7168, 128, 128, 64, 128, 512
    score = (kv_rank + rope) + kv_rank if absorbed else (nope + rope) + v
    return Peer(
        name="DeepSeek-R1" + (", absorbed" if absorbed else ""),
        attention=_mla_weights(M, H, nope, rope, v, 1536, kv_rank),
        layers=61,
        dense_layers=3,
        dense=3 * M * 18432,
        experts=9 * 3 * M * 2048,
        router=M * 256,
        head=M * 129280,
        score_width=H * score,
    )


def _qwen3_235b() -> Peer:
    M, H, Hkv, D = 4096, 64, 4, 128
    return Peer(
        name="Qwen3-235B-A22B",
        attention=2 * M * H * D + 2 * M * Hkv * D,
        layers=94,
        dense_layers=0,
        dense=0,
        experts=8 * 3 * M * 1536,
        router=M * 128,
        head=M * 151936,
        score_width=H * (D + D),
    )


R1, R1_ABSORBED, QWEN3 = _deepseek_r1(absorbed=False), _deepseek_r1(absorbed=True), _qwen3_235b()


def figure_curves() -> dict[str, Curve]:
    """The three curves as the figure draws them, by the figure's own labels."""
    return {"DeepSeek R1": _figure_r1(), "Qwen3-235B-A22B": _figure_qwen3(), "MiniMax-M1": _figure_m1()}


def _figure_r1() -> Curve:
    # 61 layers of experts and 3 dense layers besides: the model has 58 + 3
    weights = R1.layers * (R1.attention + R1.experts) + R1.dense_layers * R1.dense + R1.head
    return Curve(
        R1.name,
        2 * weights,
        R1.layers * 128 * (192 + 2 * 128),
        departs="61 layers of experts and 3 dense ones are counted; the model has 58 and 3",
    )


def _figure_qwen3() -> Curve:
    weights = QWEN3.layers * (QWEN3.attention + QWEN3.experts) + QWEN3.head
    return Curve(
        QWEN3.name,
        2 * weights,
        QWEN3.layers * 64 * (128 + 2 * 128),
        departs="layers and widths are the model's",
    )


def _figure_m1() -> Curve:
    config = MiniMaxM1Config.m1()
    H, D, M = config.num_attention_heads, config.head_dim, config.hidden_size
    lightning_layers, softmax_layers = 72, 8  # the model has 70 and 10
    layer = layer_parameters(config)
    lightning = sum(layer["lightning"].values()) - H * D
    experts = layer["every"]["moe_experts"] * config.num_experts_per_tok // config.num_local_experts
    weights = lightning_layers * lightning + softmax_layers * sum(layer["softmax"].values())
    weights += config.num_hidden_layers * experts + config.vocab_size * M
    memory = 2 * (H * D) ** 2  # per lightning layer and token; the recurrence needs 4 H D^2, 32 times less
    return Curve(
        "MiniMax-M1",
        2 * weights + lightning_layers * memory,
        softmax_layers * H * (D + 2 * D),
        departs="72 lightning and 8 softmax layers are counted, the model has 70 and 10; "
        f"a lightning layer's memory is counted as 2 (H D)^2 = {memory:,} FLOPs a token, "
        f"the recurrence needs 4 H D^2 = {4 * H * D * D:,}",
    )
