"""How far decoding with a cache and the training forward lie apart, in probabilities and bit by bit.

    python -m benchmarks.run --case agreement

For each model and type: prompts are continued by sampling, one cached step at a time, with the probability of
every chosen token; then the same tokens are scored as training does, in one forward, alone, in a left-padded
batch and packed into one sequence. The report (section 3.2) asks that the two probabilities correlate.

The second table says where differing bits come from: every module of the forward computes its last
position once more, alone. A share of 0 means that it has the same bits alone as among others.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minimax_hybrid import HybridCache, MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.experts import MixtureOfExperts, Router
from minimax_hybrid.layers import RMSNorm
from minimax_hybrid.lightning_attention import LightningAttention, layer_log_decay
from minimax_hybrid.rl.diagnostics import agreement
from minimax_hybrid.sequences import SequenceMetadata
from minimax_hybrid.softmax_attention import SoftmaxAttention
from minimax_hybrid.text import DEMO
from minimax_kernels import BlockMemory, extend, lightning_attention, lightning_decode
from minimax_kernels.lightning.extend import fold

from ..harness.pages import metric_table
from ..harness.rows import Row, measured

ABOUT = (
    "how far decoding with a cache and the training forward lie apart, in probabilities of sampled tokens "
    "and in bits of every kind of stage"
)
TESTS = ("tests/benchmarks/test_agreement_case.py",)
OPERATOR = "lightning attention"
SOFTMAX = "softmax layer, products included"
PRODUCTS = "matrix products"
STAGES: dict[str, tuple[type[nn.Module], ...]] = {
    "norms": (RMSNorm,),
    PRODUCTS: (nn.Linear, Router),
    "experts": (MixtureOfExperts,),
}


def random_model(width: int, *, layers: int = 8, V: int = 512) -> MiniMaxM1ForCausalLM:
    """An untrained model with probabilities far from even, as a trained one has them."""
    torch.manual_seed(0)
    config = MiniMaxM1Config.tiny(
        vocab_size=V,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        attn_type_list=[0] * (layers - 1) + [1],
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        num_local_experts=8,
        initializer_range=0.5 * width**-0.5,
    )
    model = MiniMaxM1ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 4
    return model


@torch.no_grad()
def decode(model: MiniMaxM1ForCausalLM, prompts: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """N sampled tokens (B, N) after prompts (B, P), and the log-probability with which each was drawn."""
    cache, draw = HybridCache(model.config), torch.Generator().manual_seed(0)
    new, recorded = [], []
    step = prompts
    for _ in range(N):
        log_probs = model(step, past_key_values=cache, logits_to_keep=1).logits[:, -1].log_softmax(-1)
        step = torch.multinomial(log_probs.exp(), 1, generator=draw)
        new.append(step)
        recorded.append(log_probs.gather(-1, step))
    return torch.cat(new, dim=1), torch.cat(recorded, dim=1)


@torch.no_grad()
def score(model: MiniMaxM1ForCausalLM, sequences: Tensor, N: int) -> dict[str, Tensor]:
    """Log-probabilities (B, N) of the last N tokens of sequences (B, T), in each layout training uses."""
    B, T = sequences.shape
    pad = 7
    padded = torch.cat([sequences.new_zeros(B, pad), sequences], dim=1)
    mask = torch.cat([torch.zeros(B, pad), torch.ones(B, T)], dim=1).long()
    packed = model.log_probs(sequences.view(1, -1), position_ids=torch.arange(T).repeat(B)[None])
    return {
        "one forward": model.log_probs(sequences)[:, -N:],
        "left-padded": model.log_probs(padded, attention_mask=mask)[:, -N:],
        "packed": packed.view(B, T)[:, -N:],
    }


@torch.no_grad()
def differing_bits(model: MiniMaxM1ForCausalLM, ids: Tensor) -> dict[str, tuple[float, float]]:
    """For each kind of stage: the share of elements whose bits differ when the last position of one forward
    over ids (1, T) is computed alone, and the largest difference relative to the largest element."""
    captured: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
        captured[module] = args[0], out[0] if isinstance(out, tuple) else out

    kinds = (SoftmaxAttention, *(kind for group in STAGES.values() for kind in group))
    watched = [module for module in model.modules() if isinstance(module, kinds)]
    hooks = [module.register_forward_hook(keep) for module in watched]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()

    gaps: dict[str, list[tuple[Tensor, Tensor]]] = {OPERATOR: [], SOFTMAX: []}
    for module in model.modules():
        if isinstance(module, LightningAttention):
            gaps[OPERATOR].append(_operator_gap(module, captured[module.qkv_proj][1]))
        if isinstance(module, SoftmaxAttention):
            x, out = captured[module]
            gaps[SOFTMAX].append((out[0, -1], _softmax_step(model, module, x)))
    for name, kinds in STAGES.items():
        gaps[name] = [
            (out.flatten(0, -2)[-1], _alone(module, x))
            for module, (x, out) in captured.items()
            if isinstance(module, kinds)
        ]
    return {name: _share_and_size(pairs) for name, pairs in gaps.items()}


def _alone(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x[..., -1:, :])
    return (out[0] if isinstance(out, tuple) else out).flatten(0, -2)[-1]


def _operator_gap(module: LightningAttention, projected: Tensor) -> tuple[Tensor, Tensor]:
    """Lightning attention at the last position: of one call over all, and of a step after the others."""
    H, D = module.num_heads, module.head_dim
    q, k, v = module.act(projected).view(1, -1, H, 3 * D).split(D, dim=-1)
    log_decay = layer_log_decay(H, module.layer_idx, module.num_layers, device=q.device)
    whole, _ = lightning_attention(q, k, v, log_decay)
    past = (x[:, :-1] for x in (q, k, v))
    _, memory = extend(*past, log_decay, BlockMemory.empty(k, v), token_mask=None, max_rollback=0)
    step = lightning_decode(*(x[:, -1:] for x in (q, k, v)), log_decay, fold(memory, log_decay))
    return whole[:, -1].flatten(), step.flatten()


def _softmax_step(model: MiniMaxM1ForCausalLM, module: SoftmaxAttention, x: Tensor) -> Tensor:
    """A softmax layer's output (M,) at the last of its inputs x (1, T, M), as a step after the others."""
    cache, T = HybridCache(model.config), x.shape[1]
    for part in (slice(0, T - 1), slice(T - 1, T)):
        position_ids = torch.arange(T)[None, part]
        rotary = model.model.rotary_emb(position_ids)
        out, _ = module(x[:, part], SequenceMetadata(position_ids), cache, rotary=rotary, attention_mask=None)
    return out[0, -1]


def _share_and_size(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    differing = sum(int((a != b).sum()) for a, b in pairs)
    size = max(float((a.double() - b.double()).abs().max() / a.double().abs().max()) for a, b in pairs)
    return differing / sum(a.numel() for a, _ in pairs), size


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Both comparisons for each model, in float32 and bfloat16."""
    B, P, N = (2, 8, 16) if options.quick else (8, 8, 128)
    for name in ("random, width 64", "random, width 256", "demo"):
        for dtype in (torch.float32, torch.bfloat16):
            model = (
                MiniMaxM1ForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
                if name == "demo"
                else random_model(int(name.split()[-1]))
            ).to(dtype)
            yield from compare(model, name, B=B, P=P, N=N)


def compare(model: MiniMaxM1ForCausalLM, name: str, *, B: int, P: int, N: int) -> Iterator[Row]:
    """`B` prompts of `P` tokens are continued by `N` and scored in every layout; then bits, by stage."""
    rng = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, model.config.vocab_size, (B, P), generator=rng)
    new, recorded = decode(model, prompts, N)
    sequences = torch.cat([prompts, new], dim=1)
    what = dict(
        case="agreement", task=name, dtype=str(model.dtype).removeprefix("torch."), length=P + N, batch=B
    )
    for layout, scored in score(model, sequences, N).items():
        for metric, value in agreement(scored, recorded, torch.ones_like(recorded)).items():
            yield measured([value], **what, side=layout, metric=metric, unit="1")
    for stage, (share, size) in differing_bits(model, sequences[:1]).items():
        for metric, value in (("elements that differ", share), ("largest difference, relative", size)):
            yield measured([value], **what, side=stage, metric=metric, unit="1")


table = metric_table
