"""Probabilities at rollout against probabilities in training, for both types of head and both ways to decode.

    python -m benchmarks.policy.head                 the demo model, a few minutes on one core
    python -m benchmarks.policy.head --plot          only draw what was measured

The report's figure 3: with a bfloat16 head the two correlate with 0.987, with a float32 head 0.997. Here
rollouts are the model's own decoding and training is one forward over each whole sequence, on the same
machine.
"""

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.policy.records import FIGURES, Row, read_rows, write_rows
from minimax_hybrid import MiniMaxM1ForCausalLM, lightning_memory
from minimax_hybrid.compat import CACHE_NAME
from minimax_hybrid.rl.batches import Batch, collate
from minimax_hybrid.rl.diagnostics import agreement
from minimax_hybrid.rl.rollout import SamplingParams, sample
from minimax_hybrid.rl.tasks import addition, draw
from minimax_hybrid.text import DEMO

KEPT = 2000  # tokens of each condition that go into the rows, for the scatter plots
OPENINGS = ("The ", "Once upon a time ", "One sunny day ", "Count with me: ", "Today is ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--rows", type=int, default=24, help="responses")
    parser.add_argument("--tokens", type=int, default=160, help="longest response")
    parser.add_argument("--plot", action="store_true", help="draw from the committed rows, measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.plot:
        write_rows("head", list(measure(args.model, rows=args.rows, tokens=args.tokens)))
    plot()


def measure(folder: str, *, rows: int, tokens: int) -> Iterator[Row]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    problems = draw(addition, rng, difficulty=3, count=rows)
    texts = [OPENINGS[i % len(OPENINGS)] if i % 3 else problems[i].prompt for i in range(rows)]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    sampling = SamplingParams(
        end_tokens=(tokenizer.eos_token_id,),
        pad_token=tokenizer.pad_token_id,
        max_new_tokens=tokens,
        output_routed_experts=True,
    )
    for dtype in (torch.float32, torch.bfloat16):
        for head in ("float32", "bfloat16") if dtype == torch.bfloat16 else ("float32",):
            model = MiniMaxM1ForCausalLM.from_pretrained(folder, dtype=dtype)
            model.lm_head.head_dtype = getattr(torch, head)
            for decode in ("replay", "recurrent"):
                with decoding(decode):
                    generator = torch.Generator().manual_seed(0)
                    responses = sample(model, prompts, sampling, generator=generator)
                batch = collate(responses, pad_token=sampling.pad_token)
                if decode == "replay" and head == "float32":
                    body = str(dtype).removeprefix("torch.")
                    yield from ({"body": body, **row} for row in by_layer(model, batch))
                for routing in ("own", "replayed"):
                    yield compare(model, batch, replay=routing == "replayed") | {
                        "body": str(dtype).removeprefix("torch."),
                        "head": head,
                        "decode": decode,
                        "routing": routing,
                    }


@contextmanager
def decoding(kind: str) -> Iterator[None]:
    """Let lightning layers step the plain recurrence instead of replaying the open block."""
    original = lightning_memory.lightning_decode
    if kind == "recurrent":
        lightning_memory.lightning_decode = partial(original, backend="reference")
    try:
        yield
    finally:
        lightning_memory.lightning_decode = original


@torch.no_grad()
def compare(model: MiniMaxM1ForCausalLM, batch: Batch, *, replay: bool) -> Row:
    """Both probabilities of every response token, and the share of tokens whose experts differ."""
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
    kept = slice(0, KEPT)
    return {
        "tokens": int(mask.sum()),
        **agreement(log_probs, old, mask),
        "other_experts": other_experts(out.router_logits, batch),
        "training": [round(x, 5) for x in log_probs[mask][kept].exp().tolist()],
        "rollout": [round(x, 5) for x in old[mask][kept].exp().tolist()],
    }


@torch.no_grad()
def by_layer(model: MiniMaxM1ForCausalLM, batch: Batch) -> Iterator[Row]:
    """The same tokens one at a time and all at once: share of hidden states that are equal bit for bit, by
    layer."""
    ids, mask = batch.input_ids, batch.attention_mask.bool()
    whole = model(ids, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states
    memory, steps = None, []
    for t in range(ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=memory, use_cache=True, output_hidden_states=True)
        memory = out[CACHE_NAME]
        steps.append(torch.stack(out.hidden_states))  # (L + 1, B, 1, M)
    single = torch.cat(steps, dim=2)
    kinds = ["embedding", *model.config.layer_types[:-1], f"{model.config.layer_types[-1]}, last norm"]
    for i, (a, b) in enumerate(zip(whole, single, strict=True)):
        equal = (a == b).all(-1)[mask]
        gap = ((a - b).float().norm(dim=-1) / a.float().norm(dim=-1))[mask]
        yield {
            "layer": i,
            "kind": kinds[i],
            "equal": float(equal.float().mean()),
            "relative_gap": float(gap.mean()),
        }


def other_experts(router_logits: tuple[Tensor, ...], batch: Batch) -> float:
    """Share of (token, layer) pairs of the responses where the router's choice was another at rollout."""
    B, T, _, A = batch.routed_experts.shape
    now = torch.stack([x.topk(A, dim=-1)[1].view(B, T, A) for x in router_logits], dim=2)
    differ = (now.sort(-1)[0] != batch.routed_experts.long().sort(-1)[0]).any(-1)  # (B, T, L)
    ran = batch.response_mask.clone()
    ran[:, :-1] &= batch.attention_mask[:, 1:].bool()  # the last token's routing was never chosen at rollout
    ran[:, -1] = False
    return float(differ[ran].float().mean())


def plot() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "head"
    import matplotlib.pyplot as plt

    rows = [r for r in read_rows("head") if r.get("routing") == "own"]
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 7), sharex=True, sharey=True)
    for row in rows:
        column = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")].index(
            (row["body"], row["head"])
        )
        axis = axes[("replay", "recurrent").index(row["decode"])][column]
        axis.scatter(row["rollout"], row["training"], s=3, alpha=0.4, linewidths=0, rasterized=True)
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=0.6, zorder=0)
        axis.set_title(
            f"{row['body']} body, {row['head']} head, {row['decode']}\nr = {row['correlation']:.7f}",
            fontsize=8,
        )
    for axis in axes[-1]:
        axis.set_xlabel("probability at rollout")
    for axis in axes[:, 0]:
        axis.set_ylabel("probability in training")
    figure.tight_layout()
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / "policy_head.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
