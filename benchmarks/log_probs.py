"""Time and peak memory of `token_log_probs` beside log_softmax of the full logits, at the models' vocabulary.

    python -m benchmarks.log_probs [--rows 256] [--width 512] [--dtype bfloat16]

Each form runs in a process of its own, forward and backward, so that peaks do not mix.
"""

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

from minimax_kernels import token_log_probs
from minimax_kernels.log_probs.reference import token_log_probs_reference

VOCABULARY = 200_064


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_log_probs_reference(hidden, weight, targets)[0]


FORMS: dict[str, Callable[..., Tensor]] = {"chunked": token_log_probs, "plain": plain}


def measure(name: str, rows: int, width: int, dtype: str, device: str) -> tuple[float, float]:
    """Seconds (best of two) and MiB at the peak beyond inputs and gradients, forward and backward."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    # filled in place: a temporary copy here would hide the peak of what is measured
    hidden = torch.empty(rows, width, dtype=kind, device=device).normal_().requires_grad_()
    weight = torch.empty(VOCABULARY, width, dtype=kind, device=device).normal_(std=width**-0.5)
    weight.requires_grad_()
    targets = torch.randint(VOCABULARY, (rows,), device=device)
    few = weight.detach()[:1024].requires_grad_()
    FORMS[name](hidden[:1], few, targets[:1] % 1024).sum().backward()  # loads the code it needs
    held, seconds = peak_bytes(device) + hidden.nbytes + weight.nbytes, []
    for _ in range(2):
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        FORMS[name](hidden, weight, targets).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds), (peak_bytes(device) - held) / 2**20


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    full = args.rows * VOCABULARY * 4 / 2**20
    print(f"{args.rows} rows, width {args.width}, V = {VOCABULARY:,}: full logits are {full:.0f} MiB")
    print(f"{args.dtype}, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("form     seconds  peak beyond inputs and their gradients, MiB")
    for name in FORMS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, peak = pool.apply(measure, (name, args.rows, args.width, args.dtype, device))
        print(f"{name:8s} {seconds:7.2f}  {peak:8.0f}")


if __name__ == "__main__":
    main()
