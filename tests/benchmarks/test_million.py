"""A long prefill resumes where it stopped, and its times add up."""

import torch

from benchmarks.cases import million
from benchmarks.harness.models import small_config
from minimax_hybrid.model import MiniMaxM1ForCausalLM


def test_a_long_prefill_resumes_where_it_stopped(tmp_path):
    kept = tmp_path / "kept.pt"
    stopped, steps = million.prefill_and_decode(300, piece=100, kept=kept, seconds=0.0)
    assert stopped.done == 100 and not steps and kept.exists()
    done, steps = million.prefill_and_decode(300, piece=100, kept=kept)
    assert [n for n, _ in done.seconds] == [100, 200, 300] and len(steps) == million.DECODED
    assert done.seconds[0] == stopped.seconds[0]
    whole, _ = million.prefill_and_decode(300, piece=300, kept=None)
    torch.manual_seed(0)
    model = MiniMaxM1ForCausalLM(small_config()).eval()
    with torch.inference_mode():
        ours, theirs = (
            model(torch.tensor([[5]]), past_key_values=progress.cache).logits for progress in (done, whole)
        )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_milestones_sum_the_pieces_up_to_them(monkeypatch):
    monkeypatch.setattr(million, "MILESTONES", (200, 300, 400))
    progress = million.Progress(None, done=300, seconds=[(100, 1.0), (200, 2.0), (300, 4.0)], peak=10**9)
    found = {(r.task, r.length, r.metric): r.p50 for r in million.rows_of(progress, [0.25, 0.5, 0.75])}
    assert found["prefill", 200, "time"] == 3.0 and found["prefill", 300, "time"] == 7.0
    assert found["decode", 300, "time"] == 0.5 and found["prefill", 300, "peak memory"] == 1e9
    assert ("prefill", 400, "time") not in found
