"""A request's answer is its own: alone, in any batch, joined late, with any neighbours, prefix hit or not."""

import dataclasses

import pytest
import tiny
import torch

from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.serving import Engine, GenerationParams, QueueFullError, Request, Result

GREEDY = GenerationParams(temperature=0, max_new_tokens=12, end_tokens=())
SAMPLED = GenerationParams(seed=5, max_new_tokens=12, end_tokens=())


@pytest.fixture(scope="module")
def model() -> MiniMaxM1ForCausalLM:
    return tiny.model()


def prompt(length: int, seed: int = 0) -> list[int]:
    return tiny.tokens(1, length, seed=seed)[0].tolist()


def requests(params: GenerationParams = GREEDY) -> list[Request]:
    """Prompts on both sides of a block border, and answers of many lengths."""
    return [
        Request(prompt(length, i), dataclasses.replace(params, max_new_tokens=new, seed=i))
        for i, (length, new) in enumerate([(3, 12), (64, 5), (130, 70), (1, 30), (63, 2), (200, 9)])
    ]


def alone(model: MiniMaxM1ForCausalLM, request: Request) -> Result:
    return Engine(model, prefix_cache_bytes=0).generate([request])[0]


def assert_same(found: Result, wanted: Result) -> None:
    assert found.tokens == wanted.tokens
    assert found.finish_reason == wanted.finish_reason
    for name in ("log_probs", "sampled_log_probs"):
        tiny.assert_close(torch.tensor(getattr(found, name)), torch.tensor(getattr(wanted, name)))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, top_p=0.9, top_k=20)])
@pytest.mark.parametrize("engine", [dict(), dict(max_batch=2), dict(prefill_chunk=7), dict(max_tokens=420)])
def test_the_batch_changes_no_answer(
    model: MiniMaxM1ForCausalLM, params: GenerationParams, engine: dict
) -> None:
    wanted = [alone(model, request) for request in requests(params)]
    for found, expected in zip(Engine(model, **engine).generate(requests(params)), wanted, strict=True):
        assert_same(found, expected)


def test_greedy_answers_are_those_of_generate(model: MiniMaxM1ForCausalLM) -> None:
    for request in requests():
        ids = torch.tensor([request.prompt])
        wanted = model.generate(
            ids, do_sample=False, max_new_tokens=request.sampling.max_new_tokens, eos_token_id=None
        )
        assert alone(model, request).tokens == wanted[0, ids.shape[1] :].tolist()


def test_log_probs_are_those_that_training_sees(model: MiniMaxM1ForCausalLM) -> None:
    for temperature in (1.0, 0.7):
        params = GenerationParams(temperature=temperature, top_k=5, seed=1, max_new_tokens=20, end_tokens=())
        for length in (1, 70):
            result = alone(model, Request(prompt(length), params))
            ids = torch.tensor([prompt(length) + result.tokens])
            wanted = model.log_probs(ids, temperature=temperature)[0, length:]
            tiny.assert_close(torch.tensor(result.log_probs), wanted.detach())
            assert all(a > b for a, b in zip(result.sampled_log_probs, result.log_probs, strict=True))


def test_copies_of_a_prompt_are_computed_once(model: MiniMaxM1ForCausalLM) -> None:
    positions = []
    hook = model.register_forward_pre_hook(
        lambda _, args, options: positions.append(options["input_ids"].shape), with_kwargs=True
    )
    group = [Request(prompt(100), dataclasses.replace(SAMPLED, seed=i)) for i in range(4)]
    try:
        engine = Engine(model)
        results = engine.generate(group)
    finally:
        hook.remove()
    assert positions == [(1, 100)] + [(4, 1)] * 11
    assert [r.cached_prompt_tokens for r in results] == [0, 100, 100, 100]
    assert engine.stats().prefix_hit_rate == pytest.approx(0.75)
    for result, request in zip(results, group, strict=True):
        assert_same(result, alone(model, request))
    assert len({tuple(r.tokens) for r in results}) == 4


def test_the_next_turn_of_a_chat_computes_only_what_is_new(model: MiniMaxM1ForCausalLM) -> None:
    engine = Engine(model)
    (first,) = engine.generate([Request(prompt(90), GREEDY)])
    second = Request(prompt(90) + first.tokens + prompt(5, seed=1), GREEDY)
    (found,) = engine.generate([second])
    assert found.cached_prompt_tokens == 90 + len(first.tokens) - 1  # the last token was never run
    assert_same(found, alone(model, second))


def test_where_prompts_part_a_snapshot_serves_the_next(model: MiniMaxM1ForCausalLM) -> None:
    engine, system = Engine(model, reuse_answers=False), prompt(150)
    questions = [Request(system + prompt(20, seed=i), GREEDY) for i in (1, 2, 3)]
    results = [engine.generate([question])[0] for question in questions]
    assert [r.cached_prompt_tokens for r in results] == [0, 0, 128]  # the block border before 150
    for result, question in zip(results, questions, strict=True):
        assert_same(result, alone(model, question))


def test_new_weights_take_over_between_steps_and_mark_what_they_touched(model: MiniMaxM1ForCausalLM) -> None:
    net, new = tiny.model(), tiny.model(seed=1)
    engine = Engine(net, max_batch=1)
    first, second = (engine.submit(Request(prompt(70), GREEDY)) for _ in range(2))
    found = {first: Result(first), second: Result(second)}
    for step in range(100):
        if step == 4:
            assert engine.update_weights(new.state_dict()) == 1
        for update in engine.step():
            found[update.request_id].add(update)
        if not engine.has_work():
            break
    assert found[first].weights_versions == (0, 1)
    assert found[first].tokens[:4] == alone(model, Request(prompt(70), GREEDY)).tokens[:4]
    assert (found[second].weights_versions, found[second].cached_prompt_tokens) == ((1,), 0)
    assert_same(found[second], alone(new, Request(prompt(70), GREEDY)))
    with pytest.raises(ValueError, match="differ from the model's .*'lm_head.weight'"):
        engine.update_weights({name: x for name, x in new.state_dict().items() if name != "lm_head.weight"})


def test_a_stream_is_the_result_piece_by_piece_and_its_end_cancels(model: MiniMaxM1ForCausalLM) -> None:
    engine = Engine(model)
    request = Request(prompt(10), SAMPLED)
    found = Result(0)
    for update in engine.stream(request):
        assert len(update.tokens) == 1
        found.add(update)
    assert_same(found, alone(model, request))
    stream = engine.stream(request)
    next(stream)
    assert engine.stats().running == 1
    stream.close()
    assert (engine.stats().running, engine.stats().cancelled) == (0, 1)
    assert not engine.has_work() and engine.step() == []


def test_streams_and_submitted_requests_do_not_take_each_others_updates(model: MiniMaxM1ForCausalLM) -> None:
    engine, request = Engine(model), Request(prompt(10), SAMPLED)
    submitted = Result(engine.submit(request))
    streams = [engine.stream(request) for _ in range(2)]
    found = [Result(-1), Result(-1)]
    for one, other in zip(*streams, strict=True):
        found[0].add(one)
        found[1].add(other)
    while engine.has_work():
        for update in engine.step():
            assert update.request_id == submitted.request_id
            submitted.add(update)
    for result in (submitted, *found):
        assert_same(result, alone(model, request))


def test_a_cancelled_request_says_so_once_wherever_it_is(model: MiniMaxM1ForCausalLM) -> None:
    engine = Engine(model, max_batch=2, prefill_chunk=10)
    running, prefilling, queued = (engine.submit(Request(prompt(length), GREEDY)) for length in (5, 100, 5))
    engine.step()
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.prefilling, stats.queue) == (1, 1, 1)
    for request_id in (running, prefilling, queued):
        assert engine.cancel(request_id)
    updates = engine.step()
    assert [(u.request_id, u.finish_reason) for u in updates] == [
        (request_id, "cancelled") for request_id in (running, prefilling, queued)
    ]
    assert not engine.has_work() and not engine.cancel(running)


def test_priority_goes_first_and_a_full_queue_says_no(model: MiniMaxM1ForCausalLM) -> None:
    engine = Engine(model, max_batch=1, max_queue=2)
    low = engine.submit(Request(prompt(3), GREEDY))
    high = engine.submit(Request(prompt(3), GREEDY, priority=1))
    with pytest.raises(QueueFullError, match="2 requests wait, max_queue is 2"):
        engine.submit(Request(prompt(3), GREEDY))
    order = []
    while engine.has_work():
        order += [update.request_id for update in engine.step() if update.finish_reason]
    assert order == [high, low]
    assert len(engine.generate([Request(prompt(3), GREEDY)] * 5)) == 5  # more than the queue holds


def test_a_later_small_request_does_not_overtake_a_large_one(model: MiniMaxM1ForCausalLM) -> None:
    engine = Engine(model, max_tokens=100)
    params = dataclasses.replace(GREEDY, max_new_tokens=40)
    ids = [engine.submit(Request(prompt(length), params)) for length in (10, 50, 1)]
    order = []
    while engine.has_work():
        order += [update.request_id for update in engine.step() if update.finish_reason]
    assert order == ids


def test_requests_that_can_never_run_are_refused(model: MiniMaxM1ForCausalLM) -> None:
    engine = Engine(model, max_tokens=100)
    cases = [
        ("the prompt is empty", Request([], GREEDY)),
        ("tokens \\[-1, 99\\] are outside the vocabulary of 32", Request([1, 99, -1], GREEDY)),
        ("prompt has 95 tokens .* max_tokens of 100", Request(prompt(95), GREEDY)),
        ("stop texts need a tokenizer", Request([1], GenerationParams(stop=("a",)))),
        ("whole vocabulary", Request([1], GenerationParams(forbidden_tokens=tuple(range(32))))),
    ]
    for message, request in cases:
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
    assert not engine.has_work()
    for wrong in (dict(max_batch=0), dict(max_tokens=0), dict(prefill_chunk=0), dict(prefix_cache_bytes=-1)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Engine(model, **wrong)
    with pytest.raises(ValueError, match="call model.eval"):
        Engine(tiny.model().train())


def test_a_request_whose_logits_break_leaves_the_others_alone(model: MiniMaxM1ForCausalLM) -> None:
    net = tiny.model()
    with torch.no_grad():
        net.model.embed_tokens.weight[31] = torch.nan
    good = Request(list(range(1, 20)), dataclasses.replace(GREEDY, forbidden_tokens=(31,)))
    broken = Request([5, 31], GREEDY)
    breaks_later = Request([7], dataclasses.replace(GREEDY, forbidden_tokens=tuple(range(31))))
    results = Engine(net, max_batch=3).generate([good, broken, breaks_later, good, good])
    assert [r.finish_reason for r in results] == ["length", "error", "error", "length", "length"]
    assert [len(r.tokens) for r in results] == [12, 0, 1, 12, 12]
    for i in (0, 3, 4):
        assert_same(results[i], alone(model, good))


def test_a_step_that_fails_loses_its_requests_and_the_engine_stays_usable(
    model: MiniMaxM1ForCausalLM,
) -> None:
    engine = Engine(model)
    lost = engine.submit(Request(prompt(5), GREEDY))
    engine.step()

    def fail(*args: object) -> None:
        raise MemoryError("no room")

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        engine.step()
    hook.remove()
    assert [(u.request_id, u.finish_reason) for u in engine.step()] == [(lost, "error")]
    assert_same(engine.generate([Request(prompt(5), GREEDY)])[0], alone(model, Request(prompt(5), GREEDY)))
