"""The rollout engine beside static batches and transformers' `generate`, on answers of ragged lengths.

    python -m benchmarks.run --case serving         the demo model, some minutes on one core

Every side has 16 places and gives the same number of tokens. A static batch waits for its longest answer and
computes the prompt of every sample; the engine fills a place that is free, and computes a prompt once.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from minimax_hybrid.compat import CACHE_NAME
from minimax_hybrid.model import MiniMaxM1ForCausalLM
from minimax_hybrid.rl.tasks import addition
from minimax_hybrid.rl.tasks import draw as draw_problems
from minimax_hybrid.serving import Engine, GenerationParams, Request
from minimax_hybrid.serving.caches import keep
from minimax_hybrid.text import DEMO, load_model, load_tokenizer

from ..harness.measure import interleaved
from ..harness.pages import markdown, time_cell
from ..harness.rows import Row, measured

ABOUT = (
    "tokens per second of the engine, of static batches and of transformers' generate, with the demo model "
    "and 16 places; what a step adds to the bare forward; memory over 1,000 requests"
)
TESTS = ("tests/serving/test_engine.py", "-k", "computed_once or log_probs")
CASE = "serving"
PLACES = 16


def run(options: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    model, rng = load_model(DEMO, dtype="float32"), random.Random(0)
    places, rounds, scale = (4, 1, 6) if options.quick else (PLACES, 1, 1)
    tasks: dict[str, list[Request]] = {
        "long tail": long_tail(rng, 64 // scale),
        "addition": additions(rng, 64 // scale),
        "groups of 8": groups(rng, 6 // min(scale, 3), 8),
        "groups of 16": groups(rng, 3, 16),
    }
    for task, requests in tasks.items():
        sides = {
            "engine": lambda: with_engine(model, requests, places),  # noqa: B023
            "static": lambda: in_static_batches(static_loop, model, requests, places),  # noqa: B023
            "transformers": lambda: in_static_batches(generate, model, requests, places),  # noqa: B023
        }
        seconds = interleaved(sides, rounds=rounds)
        useful = useful_tokens(model, requests)
        shape = dict(case=CASE, task=task, length=useful, batch=places)
        for side, values in seconds.items():
            yield measured(values, side=side, **shape, metric="time", unit="s")
    steps = 5 if options.quick else 100
    for side, values in step_times(model, places, steps).items():
        yield measured(values, case=CASE, side=side, task="step", batch=places, metric="time", unit="s")
    for length in (64, 128) if options.quick else (64, 2048):
        values = [first_token(model, length, places) for _ in range(rounds)]
        yield measured(
            values, case=CASE, side="engine", task="first token under load", length=length, batch=places,
            metric="time", unit="s",
        )  # fmt: skip
    for done, size in memory_over_requests(model, rng, 60 if options.quick else 1000):
        yield measured(
            [size], case=CASE, side="engine", task="resident memory", length=done, batch=places,
            metric="memory", unit="B",
        )  # fmt: skip


def fixed(rng: random.Random, prompt: list[int], new_tokens: int) -> Request:
    """Draws exactly so many tokens."""
    params = GenerationParams(max_new_tokens=new_tokens, end_tokens=(), seed=rng.randrange(2**32))
    return Request(prompt, params)


def prompt(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(4, 100) for _ in range(rng.randint(low, high))]


def tail(rng: random.Random, median: float = 40.0) -> int:
    """A length from a log-normal distribution: half below the median, one in 100 above ten times it."""
    return min(max(int(rng.lognormvariate(0, 1) * median), 4), 512)


def long_tail(rng: random.Random, count: int) -> list[Request]:
    return [fixed(rng, prompt(rng, 8, 64), tail(rng)) for _ in range(count)]


def groups(rng: random.Random, count: int, size: int) -> list[Request]:
    """`size` answers to each prompt of 96 to 160 tokens."""
    prompts = [prompt(rng, 96, 160) for _ in range(count)]
    return [fixed(rng, one, tail(rng)) for one in prompts for _ in range(size)]


def additions(rng: random.Random, count: int) -> list[Request]:
    """Sums that the demo model has learned: it ends each answer itself."""
    tokenizer = load_tokenizer(DEMO)
    problems = draw_problems(addition, rng, difficulty=2, count=count)
    params = GenerationParams(temperature=0, max_new_tokens=32)
    return [Request(tokenizer(problem.prompt)["input_ids"], params) for problem in problems]


def useful_tokens(model: MiniMaxM1ForCausalLM, requests: Sequence[Request]) -> int:
    """Tokens that were asked for; the engine counts them where an answer ends itself."""
    if requests[0].sampling.end_tokens is None:
        return with_engine(model, requests, PLACES)
    return sum(request.sampling.max_new_tokens for request in requests)


def with_engine(model: MiniMaxM1ForCausalLM, requests: Sequence[Request], places: int) -> int:
    results = Engine(model, max_batch=places, reuse_answers=False).generate(requests)
    return sum(len(result.tokens) for result in results)


def in_static_batches(
    decode: Callable[[MiniMaxM1ForCausalLM, Tensor, Tensor, int, bool], int],
    model: MiniMaxM1ForCausalLM,
    requests: Sequence[Request],
    places: int,
) -> None:
    """Batches in order of arrival, each until its last answer has ended."""
    for start in range(0, len(requests), places):
        batch = requests[start : start + places]
        P = max(len(request.prompt) for request in batch)
        ids = torch.tensor([[0] * (P - len(request.prompt)) + request.prompt for request in batch])
        mask = torch.tensor([[0] * (P - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        longest = max(request.sampling.max_new_tokens for request in batch)
        with torch.no_grad():
            decode(model, ids, mask, longest, batch[0].sampling.end_tokens is None)


def static_loop(model: MiniMaxM1ForCausalLM, ids: Tensor, mask: Tensor, longest: int, ends: bool) -> None:
    """The plainest loop; greedy if answers end by themselves, as the engine is then."""
    cache, running = None, torch.ones(len(ids), dtype=torch.bool)
    for _ in range(longest):
        out = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
        cache, logits = out[CACHE_NAME], out.logits[:, -1]
        ids = logits.argmax(-1)[:, None] if ends else torch.multinomial(logits.softmax(-1), 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        if ends:
            running &= ids[:, 0] != model.generation_config.eos_token_id
            if not running.any():
                return


def generate(model: MiniMaxM1ForCausalLM, ids: Tensor, mask: Tensor, longest: int, ends: bool) -> None:
    end = model.generation_config.eos_token_id if ends else None
    model.generate(
        ids, attention_mask=mask, max_new_tokens=longest, do_sample=not ends, top_k=0, pad_token_id=0,
        eos_token_id=end,
    )  # fmt: skip


def loaded(model: MiniMaxM1ForCausalLM, places: int, prompts: Sequence[int]) -> Engine:
    """An engine with a request in each place, all of which run on for long."""
    rng = random.Random(1)
    engine = Engine(model, max_batch=places + 1, max_tokens=2**20)
    for length in prompts:
        engine.submit(fixed(rng, prompt(rng, length, length), 1024))
    while engine.stats().running < len(prompts):
        engine.step()
    return engine


def step_times(model: MiniMaxM1ForCausalLM, places: int, steps: int) -> dict[str, list[float]]:
    """A step of the engine and, in turns, the forward alone on a copy of its cache."""
    engine = loaded(model, places, range(64, 64 + places))
    batch = engine.batch
    assert batch.cache is not None
    cache = keep(batch.cache, range(places))
    seconds: dict[str, list[float]] = {"engine": [], "forward": []}
    for step in range(steps):
        ids = torch.tensor([[one.tokens[-1]] for one in batch.running])
        positions = torch.tensor([[one.length - 1] for one in batch.running])
        start = time.perf_counter()
        with torch.no_grad():
            model(ids, position_ids=positions, logits_to_keep=1, **{CACHE_NAME: cache})
        between = time.perf_counter()
        engine.step()
        if step:  # the first one makes room in both caches
            seconds["forward"].append(between - start)
            seconds["engine"].append(time.perf_counter() - between)
    return seconds


def first_token(model: MiniMaxM1ForCausalLM, length: int, places: int) -> float:
    """Seconds from a request to its first token while all other places are busy."""
    engine = loaded(model, places, [64] * (places - 1))
    rng = random.Random(2)
    start = time.perf_counter()
    request_id = engine.submit(fixed(rng, prompt(rng, length, length), 4))
    while not any(update.request_id == request_id and update.tokens for update in engine.step()):
        pass
    return time.perf_counter() - start


def memory_over_requests(
    model: MiniMaxM1ForCausalLM, rng: random.Random, count: int
) -> Iterator[tuple[int, float]]:
    """Resident bytes after a tenth, a half and all of the requests; one in ten is cancelled on its way."""
    engine, submitted, finished = Engine(model, max_batch=PLACES, prefix_cache_bytes=2**24), 0, 0
    marks = [count // 10, count // 2, count]
    while finished < count:
        while submitted < count and engine.stats().queue < PLACES:
            newest = engine.submit(fixed(rng, prompt(rng, 4, 100), tail(rng, median=12)))
            submitted += 1
            if rng.random() < 0.1:
                engine.cancel(rng.randint(max(0, newest - PLACES), newest))
        finished += sum(update.finish_reason is not None for update in engine.step())
        if finished >= marks[0]:
            gc.collect()
            yield marks.pop(0), float(_resident_bytes())


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def table(rows: list[Row]) -> str:
    """Tokens per second of each side, then what is not a comparison."""
    sides = ("engine", "static", "transformers")
    found = {(row.task, row.side): row for row in rows if row.metric == "time"}
    lines, others = [], []
    for task in dict.fromkeys(row.task for row in rows):
        if (task, "transformers") in found:
            of = [found[task, side] for side in sides]
            rates = [f"{row.length / row.p50:,.0f}" for row in of]
            ratios = [f"{row.p50 / of[0].p50:.2f}" for row in of[1:]]
            lines.append([task, f"{of[0].length:,}", *rates, *ratios])
    for row in rows:
        size = f", {row.length:,}" if row.length else ""
        if row.metric == "memory":
            others.append([f"{row.task} after {row.length:,} requests", f"{row.p50 / 2**20:,.0f} MiB"])
        elif row.task == "first token under load":
            others.append([f"{row.task}, prompt of {row.length:,}", time_cell(row)])
        elif row.task == "step":
            others.append([f"a step of {row.batch}, {row.side}{size}", time_cell(row)])
    head = ["tokens/s", "tokens", *sides, "engine / static", "engine / transformers"]
    return f"{markdown(head, lines, text=1)}\n\n{markdown(['what', 'value'], others, text=1)}"
