"""Sides that are compared compute what they are compared for."""

import pytest
import torch

from benchmarks.cases import log_probs, operators, vs_transformers
from benchmarks.harness.measure import Task
from benchmarks.harness.models import model_work, small_config
from minimax_hybrid.config import MiniMaxM1Config
from minimax_hybrid.cost.counts import parameters, softmax_twin
from minimax_hybrid.model import MiniMaxM1ForCausalLM


def small_whole_heads() -> MiniMaxM1Config:
    """The native case's shape, narrow: 8 layers, whole heads rotated, key/value heads shared."""
    config = vs_transformers.config().to_dict()
    narrow = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
    return MiniMaxM1Config(**config | narrow)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_this_model_and_transformers_class_compute_the_same(dtype: str, tolerance: float) -> None:
    sides = [vs_transformers.model(side, dtype, small_whole_heads()) for side in vs_transformers.SIDES]
    for kind, steps in (("prefill", 1), ("decode", 3), ("train", 2)):
        work = [model_work(model, Task(kind, 70, 2, dtype)) for model in sides]
        for _ in range(steps):
            ours, theirs = (compute().float() for compute in work)
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_what_is_said_about_the_sizes_is_so() -> None:
    assert parameters(vs_transformers.config()).total == 118_927_360


@pytest.mark.parametrize("twin", [False, True])
def test_the_twins_decode_as_they_prefill(twin: bool) -> None:
    config = softmax_twin(small_config()) if twin else small_config()
    model = MiniMaxM1ForCausalLM(config).eval()
    assert sum(p.numel() for p in model.parameters()) == parameters(config).total
    tokens = torch.randint(0, 8192, (1, 130))
    with torch.inference_mode():
        whole = model(tokens).logits[:, -1]
        memory = model(tokens[:, :-1], use_cache=True).past_key_values
        step = model(tokens[:, -1:], past_key_values=memory).logits[:, -1]
    torch.testing.assert_close(step, whole, atol=1e-5, rtol=1e-4)


def test_lightning_by_backend_gives_the_same_gradients() -> None:
    task = Task("forward+backward", 100)
    expected = operators.prepare("reference", task)()
    for found, wanted in zip(operators.prepare("chunked", task)(), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    different = operators.prepare("softmax", task)()
    assert not torch.allclose(different[0], expected[0], atol=1e-2)


def test_both_forms_of_log_probs_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "VOCABULARY", 500)
    seen = {}
    for side, form in dict(log_probs.FORMS).items():
        monkeypatch.setitem(
            log_probs.FORMS, side, lambda *args, side=side, form=form: seen.setdefault(side, form(*args))
        )
        log_probs.prepare(side, Task("log-probs", 40))()
    torch.testing.assert_close(seen["chunked"], seen["plain"])
