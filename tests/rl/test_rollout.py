"""Claims about rollouts on a tiny model: what is recorded is what training sees."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.rl.batches import Response, batch_log_probs, collate
from minimax_hybrid.rl.rollout import SamplingParams, sample

PAD, END = 0, 1
SAMPLING = SamplingParams(end_tokens=(END,), pad_token=PAD, max_new_tokens=32)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [3, 4]]


@pytest.fixture(scope="module")
def model() -> MiniMaxM1ForCausalLM:
    torch.manual_seed(0)
    return MiniMaxM1ForCausalLM(
        MiniMaxM1Config.tiny(
            vocab_size=24, num_hidden_layers=4, attn_type_list=[0, 0, 0, 1], initializer_range=0.2
        )
    )


def draw(
    model: MiniMaxM1ForCausalLM, sampling: SamplingParams = SAMPLING, num_generations: int = 4
) -> list[Response]:
    return sample(
        model, PROMPTS, sampling, num_generations=num_generations, generator=torch.Generator().manual_seed(0)
    )


def tokens_of(responses: list[Response]) -> list[list[int]]:
    return [response.tokens.tolist() for response in responses]


def response(prompt: list[int], tokens: list[int], log_probs: list[float]) -> Response:
    return Response(prompt, torch.tensor(tokens, dtype=torch.long), torch.tensor(log_probs), "length")


class Scripted(MiniMaxM1ForCausalLM):
    """A model whose every distribution is given: step t of script i puts `probabilities[i][t]` on token 2.

    A prompt of 100 i + 1 tokens follows script i, so a position says which script it is in, and where.
    """

    def __init__(self, probabilities: list[list[float]]):
        super().__init__(MiniMaxM1Config.tiny(vocab_size=4, num_hidden_layers=2, attn_type_list=[0, 1]))
        self.scripts = torch.tensor(probabilities)
        self.eval()

    @property
    def prompts(self) -> list[list[int]]:
        return [[3] * (100 * i + 1) for i in range(len(self.scripts))]

    def forward(self, input_ids: Tensor, **options: object) -> object:
        output = super().forward(input_ids, **options)
        mask, position_ids = options.get("attention_mask"), options.get("position_ids")
        position = mask.sum(-1) - 1 if position_ids is None else position_ids[:, -1]
        p = self.scripts[position // 100, position % 100]
        rest = (1 - p) / 2
        logits = torch.stack([rest * 0, rest, p, rest], -1).log()
        output.logits = logits[:, None].clamp(min=-1e4)
        return output


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_rollout_and_training_agree_on_every_token(model: MiniMaxM1ForCausalLM, temperature: float) -> None:
    responses = draw(model, dataclasses.replace(SAMPLING, temperature=temperature))
    batch = collate(responses, pad_token=PAD)
    log_probs, entropy = batch_log_probs(model, batch)
    gap = (log_probs - batch.old_log_probs)[batch.response_mask].abs().max().item()
    assert gap < 1e-5
    assert (batch.old_log_probs[batch.response_mask] < 0).all()
    assert (entropy[batch.response_mask] > 0).all()


def test_training_agrees_in_every_layout(model: MiniMaxM1ForCausalLM) -> None:
    responses = draw(model, num_generations=2)
    sequences = [torch.cat([torch.tensor(r.prompt), r.tokens]) for r in responses]
    drawn = torch.cat([r.log_probs for r in responses])

    T = max(map(len, sequences))
    left = torch.stack([torch.nn.functional.pad(ids, (T - len(ids), 0), value=PAD) for ids in sequences])
    mask = torch.stack([torch.arange(T) >= T - len(ids) for ids in sequences]).long()
    padded = model.log_probs(left, attention_mask=mask)
    scored = [x[-len(r.tokens) :] for x, r in zip(padded, responses, strict=True)]
    assert (torch.cat(scored) - drawn).abs().max() < 1e-4

    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])[None]
    packed = model.log_probs(torch.cat(sequences)[None], position_ids=positions)[0]
    split = packed.split([len(ids) for ids in sequences])
    scored = [x[-len(r.tokens) :] for x, r in zip(split, responses, strict=True)]
    assert (torch.cat(scored) - drawn).abs().max() < 1e-4


def test_the_recorded_log_probability_is_at_the_temperature_and_over_everything() -> None:
    net = MiniMaxM1ForCausalLM(MiniMaxM1Config.tiny(vocab_size=3, num_hidden_layers=2))
    net.register_forward_hook(lambda *call: setattr(call[-1], "logits", torch.tensor([[[2.0, 1.0, 0.0]]])))
    sampling = SamplingParams(end_tokens=(0,), pad_token=1, max_new_tokens=1, temperature=0.5, greedy=True)
    (response,) = sample(net, [[2]], sampling)
    assert response.tokens.tolist() == [0]
    # Token 1 is the padding and cannot be drawn; the distribution recorded is the model's own all the same.
    assert response.log_probs[0] == pytest.approx(-0.142932, abs=1e-6)


def test_what_generate_is_set_to_does_not_reach_a_rollout() -> None:
    """top_k, top_p and the like would cut the distribution that ratios are taken over."""
    torch.manual_seed(0)
    net = MiniMaxM1ForCausalLM(MiniMaxM1Config.tiny(vocab_size=24, num_hidden_layers=2))
    free = draw(net)
    for name, value in (("do_sample", True), ("top_k", 1), ("top_p", 0.1), ("temperature", 0.1)):
        setattr(net.generation_config, name, value)
    again = draw(net)
    assert tokens_of(again) == tokens_of(free)
    assert [r.log_probs.tolist() for r in again] == [r.log_probs.tolist() for r in free]


def test_groups_are_neighbours_and_every_response_ends_for_a_reason(model: MiniMaxM1ForCausalLM) -> None:
    responses = draw(model)
    assert [r.group for r in responses] == [0] * 4 + [1] * 4
    assert [r.prompt for r in responses] == [PROMPTS[0]] * 4 + [PROMPTS[1]] * 4
    for r in responses:
        assert r.finish_reason == ("end" if r.tokens[-1] == END else "length")
        assert END not in r.tokens[:-1]
        assert len(r.tokens) == 32 or r.finish_reason == "end"
    assert {r.finish_reason for r in responses} == {"end", "length"}


def test_the_padding_token_is_never_drawn_unless_it_ends_the_text(model: MiniMaxM1ForCausalLM) -> None:
    assert all(PAD not in r.tokens for r in draw(model, num_generations=16))
    as_end = draw(model, dataclasses.replace(SAMPLING, end_tokens=(PAD,)), num_generations=16)
    assert any(r.tokens[-1] == PAD for r in as_end)
    assert all(PAD not in r.tokens[:-1] for r in as_end)


def test_responses_that_ended_are_left_out_and_change_nothing(model: MiniMaxM1ForCausalLM) -> None:
    """Most responses end early here, so the cache is narrowed several times."""
    ends = dataclasses.replace(SAMPLING, end_tokens=tuple(range(1, 9)), output_routed_experts=True)
    responses = draw(model, ends, num_generations=12)
    lengths = sorted(len(r.tokens) for r in responses)
    assert lengths[12] <= 3 and lengths[-1] > 6
    batch = collate(responses, pad_token=PAD)
    for replay in (False, True):
        log_probs, _ = batch_log_probs(model, batch, replay_routing=replay)
        assert (log_probs - batch.old_log_probs)[batch.response_mask].abs().max() < 1e-5


def test_a_response_does_not_depend_on_its_neighbours(model: MiniMaxM1ForCausalLM) -> None:
    greedy = dataclasses.replace(SAMPLING, greedy=True, end_tokens=(END,))
    together = sample(model, PROMPTS, greedy)
    alone = [sample(model, [prompt], greedy)[0] for prompt in PROMPTS]
    assert tokens_of(together) == tokens_of(alone)


def test_the_generator_decides_and_the_global_one_is_left_alone(model: MiniMaxM1ForCausalLM) -> None:
    before = torch.get_rng_state()
    one, two = draw(model), draw(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert tokens_of(one) == tokens_of(two)


def test_sampling_leaves_the_mode_of_the_model(model: MiniMaxM1ForCausalLM) -> None:
    model.train()
    draw(model)
    assert model.training
    model.eval()


@pytest.mark.parametrize(
    ("script", "finish", "length"),
    [
        ([0.995] * 40, "repetition", 30),
        ([0.995] * 29 + [0.5] + [0.995] * 29, "length", 59),
        ([0.99] * 40, "length", 40),
    ],
)
def test_the_repetition_rule_counts_consecutive_confident_tokens(
    script: list[float], finish: str, length: int
) -> None:
    sampling = SamplingParams(
        end_tokens=(1,), pad_token=0, max_new_tokens=len(script), greedy=True, repetition_run=30
    )
    (response,) = sample(Scripted([script]), [[3]], sampling)
    assert (response.finish_reason, len(response.tokens)) == (finish, length)
    (free,) = sample(Scripted([script]), [[3]], dataclasses.replace(sampling, repetition_run=None))
    assert (free.finish_reason, len(free.tokens)) == ("length", len(script))


def test_a_response_that_repeats_does_not_stop_the_others() -> None:
    sampling = SamplingParams(end_tokens=(1,), pad_token=0, max_new_tokens=12, greedy=True, repetition_run=5)
    scripted = Scripted([[0.995] * 12, [0.9] * 12, [0.9] + [0.995] * 11])
    responses = sample(scripted, scripted.prompts, sampling)
    assert [(r.finish_reason, len(r.tokens)) for r in responses] == [
        ("repetition", 5),
        ("length", 12),
        ("repetition", 6),
    ]


def test_masks_come_from_positions_not_values() -> None:
    responses = [
        response([PAD, 5], [PAD, PAD, END], [-1.0, -2.0, -3.0]),
        response([END], [7], [-4.0]),
        response([5, 5, 5], [], []),
    ]
    batch = collate(responses, pad_token=PAD)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert batch.response_mask.tolist() == [
        [False, False, True, True, True],
        [False, True, False, False, False],
        [False] * 5,
    ]
    assert batch.old_log_probs.tolist() == [[0, 0, -1, -2, -3], [0, -4, 0, 0, 0], [0] * 5]


def test_replayed_routing_reproduces_the_rollout_and_overrules_the_router(
    model: MiniMaxM1ForCausalLM,
) -> None:
    batch = collate(draw(model, dataclasses.replace(SAMPLING, output_routed_experts=True)), pad_token=PAD)
    mask = batch.response_mask
    assert batch.routed_experts.shape == (*batch.input_ids.shape, 4, 2)
    free, _ = batch_log_probs(model, batch)
    replayed, _ = batch_log_probs(model, batch, replay_routing=True)
    assert torch.allclose(free[mask], replayed[mask], atol=1e-5)
    swapped = dataclasses.replace(batch, routed_experts=(batch.routed_experts + 1) % 4)
    other, _ = batch_log_probs(model, swapped, replay_routing=True)
    assert (other - free)[mask].abs().max() > 1e-3


def test_replay_trains_the_routers_through_live_logits(model: MiniMaxM1ForCausalLM) -> None:
    batch = collate(draw(model, dataclasses.replace(SAMPLING, output_routed_experts=True)), pad_token=PAD)
    log_probs, _ = batch_log_probs(model, batch, replay_routing=True)
    router = model.model.layers[0].block_sparse_moe.gate.weight
    (gradient,) = torch.autograd.grad(log_probs[batch.response_mask].sum(), router)
    assert gradient.abs().sum() > 0


def test_what_does_not_fit_is_refused(model: MiniMaxM1ForCausalLM) -> None:
    routed = draw(model, dataclasses.replace(SAMPLING, output_routed_experts=True))
    cut = dataclasses.replace(routed[0], tokens=routed[0].tokens[:-1], log_probs=routed[0].log_probs[:-1])
    plain = draw(model)
    cut_off = dataclasses.replace(plain[1], filtered=True)
    warm = dataclasses.replace(plain[1], temperature=0.7)
    batch = collate(plain, pad_token=PAD)
    cases = [
        ("they are not of these tokens", lambda: collate([cut, routed[1]], pad_token=PAD)),
        ("some have none", lambda: collate([routed[0], plain[1]], pad_token=PAD)),
        ("responses \\[1\\] .* full vocabulary", lambda: collate([plain[0], cut_off], pad_token=PAD)),
        ("temperatures \\[0.7, 1.0\\]", lambda: collate([plain[0], warm], pad_token=PAD)),
        ("output_routed_experts=True", lambda: batch_log_probs(model, batch, replay_routing=True)),
        (
            "tokens and 0 log-prob",
            lambda: collate([dataclasses.replace(plain[0], log_probs=torch.zeros(0))], pad_token=PAD),
        ),
        ("no responses", lambda: collate([], pad_token=PAD)),
        ("prompts \\[1\\] are empty", lambda: sample(model, [[3], []], SAMPLING)),
        (
            "num_generations must be at least 1, got 0",
            lambda: sample(model, [[3]], SAMPLING, num_generations=0),
        ),
        ("tokens \\[-1, 99\\] .* outside the vocabulary", lambda: sample(model, [[3, 99], [-1]], SAMPLING)),
        (
            "tokens \\[99\\]",
            lambda: sample(model, [[3]], dataclasses.replace(SAMPLING, pad_token=99, end_tokens=(99,))),
        ),
        ("temperature must be", lambda: dataclasses.replace(SAMPLING, temperature=0.0)),
        ("max_new_tokens must be", lambda: dataclasses.replace(SAMPLING, max_new_tokens=0)),
        ("end_tokens is empty", lambda: dataclasses.replace(SAMPLING, end_tokens=())),
    ]
    for message, run in cases:
        with pytest.raises(ValueError, match=message):
            run()


def test_logits_that_are_not_finite_are_named_by_response_and_step() -> None:
    script = Scripted([[0.5, 0.5], [0.5, math.nan]])
    with pytest.raises(FloatingPointError, match="at new token 1 of responses \\[1\\], to prompts \\[1\\]"):
        sample(
            script,
            script.prompts,
            SamplingParams(end_tokens=(0,), pad_token=0, max_new_tokens=2, greedy=True),
        )
    assert sample(script, [], SAMPLING) == []


@pytest.mark.parametrize("greedy", [True, False])
def test_responses_that_have_ended_are_neither_named_nor_in_the_way(greedy: bool) -> None:
    until_two = SamplingParams(end_tokens=(2,), pad_token=0, max_new_tokens=2, greedy=greedy)
    ended_then_broken, sound = [1.0, math.nan], [0.0, 0.0]
    scripted = Scripted([ended_then_broken, sound, sound])
    responses = sample(scripted, scripted.prompts, until_two)
    assert [len(response.tokens) for response in responses] == [1, 2, 2]
    ended, broken = [1.0, 1.0], [0.0, math.nan]
    scripted = Scripted([ended, ended, ended, broken])
    with pytest.raises(FloatingPointError, match="responses \\[3\\], to prompts \\[3\\]"):
        sample(scripted, scripted.prompts, until_two)


def test_a_rollout_computes_logits_of_the_last_position_only(model: MiniMaxM1ForCausalLM) -> None:
    seen = []
    hook = model.register_forward_hook(lambda *call: seen.append(call[-1].logits.shape[1]))
    sample(model, PROMPTS, SAMPLING, num_generations=2)
    hook.remove()
    assert set(seen) == {1}
