"""Any schedule of submissions, steps and cancellations: every answer equals the answer alone."""

import functools

import pytest
import tiny
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.serving import Engine, GenerationParams, Request, Result

BATCH, POSITIONS = 4, 700


@functools.cache
def model() -> MiniMaxM1ForCausalLM:
    return tiny.model()


@functools.cache
def alone(length: int, seed: int, new: int, filtered: bool, greedy: bool) -> Result:
    return Engine(model(), prefix_cache_bytes=0).generate([request(length, seed, new, filtered, greedy)])[0]


def request(length: int, seed: int, new: int, filtered: bool, greedy: bool) -> Request:
    """Prompts are beginnings of one text, or of another from token 70 on, so that many share a prefix."""
    common = tiny.tokens(1, 200)[0].tolist()
    other = common[:70] + tiny.tokens(1, 130, seed=1)[0].tolist()
    params = GenerationParams(
        seed=seed, max_new_tokens=new, end_tokens=(3,), greedy=greedy,
        **(dict(top_k=8, top_p=0.9, repetition_penalty=1.2) if filtered else {}),
    )  # fmt: skip
    return Request((common if seed % 2 else other)[:length], params, priority=seed % 3)


class Schedule(RuleBasedStateMachine):
    @initialize(
        chunk=st.sampled_from([5, 64, 512]),
        prefix_bytes=st.sampled_from([0, 150_000, 2**24]),
    )
    def start(self, chunk: int, prefix_bytes: int) -> None:
        self.engine = Engine(
            model(),
            max_batch=BATCH,
            max_tokens=POSITIONS,
            prefill_chunk=chunk,
            prefix_cache_bytes=prefix_bytes,
        )
        self.wanted: dict[int, Result] = {}
        self.found: dict[int, Result] = {}

    @rule(
        length=st.sampled_from([1, 63, 64, 65, 90, 150]),
        seed=st.integers(0, 5),
        new=st.sampled_from([1, 4, 20, 70]),
        filtered=st.booleans(),
        greedy=st.booleans(),
        copies=st.sampled_from([1, 1, 3]),
    )
    def submit(self, copies: int, **settings: int) -> None:
        for _ in range(copies):
            request_id = self.engine.submit(request(**settings))
            self.wanted[request_id] = alone(**settings)
            self.found[request_id] = Result(request_id)

    @rule(steps=st.sampled_from([1, 3, 20]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for update in self.engine.step():
                self.found[update.request_id].add(update)
                self.check(self.found[update.request_id])

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        under_way = [i for i, result in self.found.items() if result.finish_reason is None]
        if under_way:
            assert self.engine.cancel(data.draw(st.sampled_from(under_way)))
            self.step(1)

    def check(self, found: Result) -> None:
        wanted, n = self.wanted[found.request_id], len(found.tokens)
        assert found.tokens == wanted.tokens[:n]
        for name in ("log_probs", "sampled_log_probs"):
            tiny.assert_close(*(torch.tensor(getattr(one, name)[:n]) for one in (found, wanted)))
        if found.finish_reason != "cancelled":
            assert found.finish_reason == (wanted.finish_reason if n == len(wanted.tokens) else None)

    @invariant()
    def limits_are_kept(self) -> None:
        if not hasattr(self, "engine"):
            return
        stats, batch = self.engine.stats(), self.engine.batch
        assert stats.running + stats.prefilling <= BATCH
        assert stats.prefix_bytes <= self.engine.prefixes.max_bytes
        assert batch.cache is None or len(batch.slots) * batch.cache.get_seq_length() <= POSITIONS

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work():
            self.step(1)
        for found in self.found.values():
            assert found.finish_reason is not None
            self.check(found)
        assert self.engine.stats().running == self.engine.stats().queue == 0


def run(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Schedule,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )


def test_any_schedule_gives_the_answers_that_each_request_has_alone() -> None:
    run(examples=8, steps=12)


@pytest.mark.slow
def test_many_schedules_give_the_answers_that_each_request_has_alone() -> None:
    run(examples=60, steps=30)
