"""What /metrics tells Prometheus, in its text format."""

from collections.abc import Iterator

from .requests import Stats
from .worker import Counters

Sample = tuple[str, float]  # labels and value


def metrics_text(stats: Stats, counters: Counters) -> str:
    return "".join(line + "\n" for line in _lines(stats, counters))


def _lines(stats: Stats, counters: Counters) -> Iterator[str]:
    finished: list[Sample] = [
        (f'{{reason="{reason}"}}', count) for reason, count in sorted(counters.finished.items())
    ]
    metrics: list[tuple[str, str, str, list[Sample]]] = [
        ("requests_waiting", "gauge", "requests in the queue", [("", stats.queue)]),
        ("requests_running", "gauge", "requests in prefill or decode",
         [("", stats.prefilling + stats.running)]),
        ("requests_finished_total", "counter", "requests by how they ended", finished),
        ("prompt_tokens_total", "counter", "tokens of admitted prompts", [("", stats.prompt_tokens)]),
        ("prompt_tokens_cached_total", "counter", "those of them that were reused",
         [("", stats.cached_prompt_tokens)]),
        ("new_tokens_total", "counter", "generated tokens", [("", stats.tokens_generated)]),
        ("tokens_per_second", "gauge", "generated tokens, mean of the last 10 s",
         [("", counters.tokens_per_second())]),
        ("prefix_hit_ratio", "gauge", "share of prompt tokens that were reused",
         [("", stats.prefix_hit_rate)]),
        ("cache_bytes", "gauge", "keys, values and states of running requests", [("", stats.cache_bytes)]),
        ("prefix_cache_bytes", "gauge", "snapshots kept for reuse", [("", stats.prefix_bytes)]),
        ("weights_version", "gauge", "how often the weights were replaced", [("", stats.weights_version)]),
    ]  # fmt: skip
    for name, kind, text, samples in metrics:
        full = f"minimax_hybrid_{name}"
        yield f"# HELP {full} {text}"
        yield f"# TYPE {full} {kind}"
        for labels, value in samples:
            yield f"{full}{labels} {value}"
