"""Probabilities at rollout against probabilities in training, for both types of head and both ways to decode.

    python -m benchmarks.run --case policy_head         the demo model, a few minutes on one core

The report's figure 3: with a bfloat16 head the two correlate with 0.987, with a float32 head 0.997. Here
rollouts are the model's own decoding and training is one forward over each whole sequence, on the same
machine.
"""

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.compat import CACHE_NAME
from minimax_hybrid.cost.plotting import COLORS, INK, picture
from minimax_hybrid.lightning_attention import LightningAttention
from minimax_hybrid.rl.batches import Batch, collate
from minimax_hybrid.rl.diagnostics import agreement
from minimax_hybrid.rl.rollout import SamplingParams, sample
from minimax_hybrid.rl.tasks import addition
from minimax_hybrid.rl.tasks import draw as draw_problems
from minimax_hybrid.text import DEMO

from ..harness.pages import markdown
from ..harness.rows import Row, grouped, measured

ABOUT = (
    "probabilities at rollout against probabilities in training, for both types of head, both ways to "
    "decode, and experts of their own or replayed"
)
TESTS = ("tests/benchmarks/test_policy.py", "-k", "head")
CASE = "policy_head"

KEPT = 2000  # tokens of each condition that are kept, for the picture
OPENINGS = ("The ", "Once upon a time ", "One sunny day ", "Count with me: ", "Today is ")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--responses", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160, help="longest response")


def run(options: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    B, T = (3, 12) if options.quick else (options.responses, options.tokens)
    yield from measure(options.model, responses=B, tokens=T)


def measure(folder: str, *, responses: int, tokens: int) -> Iterator[Row]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = draw_problems(addition, random.Random(0), difficulty=3, count=responses)
    texts = [OPENINGS[i % len(OPENINGS)] if i % 3 else problems[i].prompt for i in range(responses)]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    sampling = SamplingParams(
        end_tokens=(tokenizer.eos_token_id,),
        pad_token=tokenizer.pad_token_id,
        max_new_tokens=tokens,
        output_routed_experts=True,
    )
    for body, head in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
        model = MiniMaxM1ForCausalLM.from_pretrained(folder, dtype=getattr(torch, body))
        model.lm_head.head_dtype, model.config.head_dtype = getattr(torch, head), head
        for decode in ("replay", "recurrent"):
            with decoding(model, decode):
                generator = torch.Generator().manual_seed(0)
                sampled = sample(model, prompts, sampling, generator=generator)
            batch = collate(sampled, pad_token=sampling.pad_token)
            if decode == "replay" and head == "float32":
                yield from by_layer(model, batch, body)
            for routing in ("own", "replayed"):
                what = dict(case=CASE, side=decode, task=f"head {head}, experts {routing}", dtype=body)
                numbers, curves = compare(model, batch, replay=routing == "replayed")
                for metric, value in numbers.items():
                    yield measured([value], keep=True, **what, metric=metric, unit="1")
                for metric, values in curves.items():
                    yield measured(values, keep=True, **what, metric=metric, unit="probability")


@contextmanager
def decoding(model: MiniMaxM1ForCausalLM, kind: str) -> Iterator[None]:
    """Let lightning layers step the plain recurrence instead of replaying the open block."""
    layers = [layer for layer in model.modules() if isinstance(layer, LightningAttention)]
    for layer in layers:
        layer.backend = "reference" if kind == "recurrent" else "auto"
    try:
        yield
    finally:
        for layer in layers:
            layer.backend = "auto"


@torch.no_grad()
def compare(
    model: MiniMaxM1ForCausalLM, batch: Batch, *, replay: bool
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """How the probabilities of the response tokens and their experts agree, and the first KEPT of both."""
    out = model(
        batch.input_ids,
        attention_mask=batch.attention_mask,
        output_router_logits=True,
        routed_experts=batch.routed_experts if replay else None,
        use_cache=False,
    )
    # Through the head's own logits, so that a bfloat16 head is one in training as well.
    scores = out.logits[:, :-1].float().log_softmax(-1)
    log_probs = scores.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    mask, old = batch.response_mask[:, 1:], batch.old_log_probs[:, 1:]
    numbers = {
        "tokens": int(mask.sum()),
        **agreement(log_probs, old, mask),
        "other_experts": other_experts(out.router_logits, batch),
    }
    sides = {"training": log_probs, "rollout": old}
    return numbers, {name: [round(p, 5) for p in x[mask][:KEPT].exp().tolist()] for name, x in sides.items()}


@torch.no_grad()
def by_layer(model: MiniMaxM1ForCausalLM, batch: Batch, body: str) -> Iterator[Row]:
    """The same tokens one at a time and all at once: the share of hidden states that are equal bit for bit,
    and their mean relative gap, by layer."""
    ids, mask = batch.input_ids, batch.attention_mask.bool()
    whole = model(ids, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states
    memory, steps = None, []
    for t in range(ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=memory, use_cache=True, output_hidden_states=True)
        memory = out[CACHE_NAME]
        steps.append(torch.stack(out.hidden_states))  # (L + 1, B, 1, M)
    single = torch.cat(steps, dim=2)
    kinds = ["embedding", *model.config.layer_types[:-1], f"{model.config.layer_types[-1]}, last norm"]
    equal, gap = [], []
    for a, b in zip(whole, single, strict=True):
        equal.append(float((a == b).all(-1)[mask].float().mean()))
        gap.append(float(((a - b).float().norm(dim=-1) / a.float().norm(dim=-1))[mask].mean()))
    what = dict(case=CASE, side="one token at a time", task="by layer", dtype=body, at=kinds)
    yield measured(equal, **what, metric="equal", unit="share")
    yield measured(gap, **what, metric="relative_gap", unit="1")


def other_experts(router_logits: tuple[Tensor, ...], batch: Batch) -> float:
    """Share of (token, layer) pairs of the responses where the router's choice was another at rollout."""
    B, T, _, A = batch.routed_experts.shape
    now = torch.stack([x.topk(A, dim=-1)[1].view(B, T, A) for x in router_logits], dim=2)
    differ = (now.sort(-1)[0] != batch.routed_experts.long().sort(-1)[0]).any(-1)  # (B, T, L)
    ran = batch.response_mask.clone()
    ran[:, :-1] &= batch.attention_mask[:, 1:].bool()  # the last token's routing was never chosen at rollout
    ran[:, -1] = False
    return float(differ[ran].float().mean())


COLUMNS = {
    "correlation": ("Pearson r", ".8f"),
    "probability_mean": ("mean difference", ".1e"),
    "probability_max": ("largest", ".1e"),
    "log_ratio_max": ("largest log-ratio", ".1e"),
    "other_experts": ("other experts", ".5f"),
}


def table(rows: list[Row]) -> str:
    """One line for each type, head, way to decode and experts in training."""
    lines = []
    for key, of in grouped([row for row in rows if row.metric in COLUMNS], "dtype", "task", "side").items():
        found = {row.metric: row.values[0] for row in of}
        lines.append([*key, *(f"{found[metric]:{style}}" for metric, (_, style) in COLUMNS.items())])
    head = ["body", "head, and experts in training", "decode", *(name for name, _ in COLUMNS.values())]
    return markdown(head, lines, text=3)


def tables(rows: list[Row]) -> dict[str, tuple[list[Row], str]]:
    """Where the bits part, by layer."""
    of = {(row.dtype, row.metric): row for row in rows if row.task == "by layer"}
    columns = [
        [f"{100 * x:.1f} %" if metric == "equal" else f"{x:.1e}" for x in of[body, metric].values]
        for body in ("bfloat16", "float32")
        for metric in ("equal", "relative_gap")
    ]
    kinds = of["float32", "equal"].at
    lines = [[str(i), *cells] for i, cells in enumerate(zip(kinds, *columns, strict=True))]
    head = ["after layer", "kind", "bfloat16: equal", "gap", "float32: equal", "gap"]
    return {"layers": (list(of.values()), markdown(head, lines))}


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Both probabilities of every token, with the experts of training its own."""
    path = folder / "policy_head.svg"
    conditions = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"))
    with picture(path, panels=3, height=4.4) as axes:
        for axis, (body, head) in zip(axes, conditions, strict=True):
            of = [row for row in rows if (row.dtype, row.task) == (body, f"head {head}, experts own")]
            for decode, color in (("recurrent", "softmax"), ("replay", "hybrid")):
                found = {row.metric: row.values for row in of if row.side == decode}
                label = f"{decode}, r = {found['correlation'][0]:.7f}"
                style = dict(s=3, alpha=0.4, linewidths=0, rasterized=True, color=COLORS[color])
                axis.scatter(found["rollout"], found["training"], label=label, **style)
            axis.plot([0, 1], [0, 1], color=INK, lw=0.6, zorder=0)
            axis.set(title=f"{body} body, {head} head", xlabel="probability at rollout")
            axis.legend(fontsize=8, markerscale=4)
        axes[0].set_ylabel("probability in training")
    return [path]
