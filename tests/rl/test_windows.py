"""The output window grows when perplexity has converged and lengths approach it, and not before."""

import pytest

from minimax_hybrid.rl.settings import StagedWindow

REPORT = tuple(1000 * k for k in (40, 48, 56, 64, 72, 80))


def test_both_indicators_are_needed() -> None:
    settled, moving = [2.0] * 6, [2.0, 1.8, 1.6, 1.4, 1.2, 1.0]
    for perplexities, length, stage in ((settled, 39_000, 1), (settled, 20_000, 0), (moving, 39_000, 0)):
        window = StagedWindow(REPORT)
        for perplexity in perplexities:
            window.observe(perplexity=perplexity, length_p99=length)
        assert window.stage == stage


def test_every_stage_waits_for_its_own_perplexity_and_the_last_one_stays() -> None:
    window = StagedWindow(REPORT, patience=3)
    sizes = []
    for _ in range(30):
        sizes.append(window.size)
        window.observe(perplexity=2.0, length_p99=0.95 * window.size)
    assert sizes == sorted(size for size in REPORT for _ in range(4))[:20] + [80_000] * 10


def test_the_report_of_a_batch_is_of_the_window_it_was_drawn_in() -> None:
    window = StagedWindow((4, 8), patience=1)
    window.observe(perplexity=1.0, length_p99=4)
    assert window.observe(perplexity=1.0, length_p99=4) == {
        "window": 4,
        "window_converged": 1.0,
        "window_near": 1.0,
    }
    assert window.size == 8


@pytest.mark.parametrize("sizes", [(), (0, 4), (8, 4), (4, 4)])
def test_windows_that_do_not_grow_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be positive and grow"):
        StagedWindow(sizes)
