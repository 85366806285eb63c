"""Rollouts: G responses to each prompt, with what training needs to know about how they were drawn.

The serving engine draws them. It records the log-probability of every chosen token under the model's full
distribution at the sampling temperature (never a truncated one), why the response ended, and, on request,
which experts every position went to.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..serving import Engine, GenerationParams, Request, Result
from .batches import Response

PREFILL_CHUNK = 4096  # no reader waits for a first token


@dataclass(frozen=True)
class SamplingParams:
    """How to draw a response.

    Args:
        end_tokens: any of these ends a response and is its last token.
        pad_token: pads prompts on the left; never drawn unless it is an end token (a policy that samples
            its padding trains on an embedding that nothing else trains).
        max_new_tokens: the output window.
        temperature: what the logits are divided by, in drawing and in the recorded log-probabilities.
        greedy: take the most probable token instead of drawing one.
        repetition_run: end a response after so many tokens in a row with probability above
            repetition_threshold (report, section 3.2: 3,000 and 0.99); None for no such rule.
        output_routed_experts: keep the experts of every position.
    """

    end_tokens: tuple[int, ...]
    pad_token: int
    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    repetition_run: int | None = None
    repetition_threshold: float = 0.99
    output_routed_experts: bool = False

    def __post_init__(self) -> None:
        if not self.end_tokens:
            raise ValueError("end_tokens is empty: no response could end before its window")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be finite and above 0, got {self.temperature}; "
                "greedy=True takes the likeliest token"
            )

    def generation_params(self, seed: int) -> GenerationParams:
        """The same for one request of the engine."""
        return GenerationParams(
            temperature=self.temperature,
            greedy=self.greedy,
            seed=seed,
            max_new_tokens=self.max_new_tokens,
            end_tokens=self.end_tokens,
            forbidden_tokens=() if self.pad_token in self.end_tokens else (self.pad_token,),
            repetition_run=self.repetition_run,
            repetition_threshold=self.repetition_threshold,
            output_routed_experts=self.output_routed_experts,
        )


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: list[list[int]],
    sampling: SamplingParams,
    *,
    num_generations: int = 1,
    generator: torch.Generator | None = None,
) -> list[Response]:
    """`num_generations` responses to each prompt, neighbours in the result; a prompt's index is their group.

    Raises:
        ValueError: an empty prompt, less than one generation, tokens that the model does not have.
        FloatingPointError: logits that are not finite, with prompt and step.
    """
    if not prompts:
        return []
    if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"prompts {empty[:10]} are empty: the first token needs one before it")
    if num_generations < 1:
        raise ValueError(f"num_generations must be at least 1, got {num_generations}")
    V = model.config.vocab_size
    given = {sampling.pad_token, *sampling.end_tokens, *(token for prompt in prompts for token in prompt)}
    if foreign := sorted(token for token in given if not 0 <= token < V):
        raise ValueError(
            f"tokens {foreign[:10]} of the prompts, pad_token or end_tokens are outside the vocabulary of {V}"
        )
    training = model.training
    model.eval()
    try:
        results = _engine(model, prompts, sampling, num_generations).generate(
            _requests(prompts, sampling, num_generations, generator)
        )
    finally:
        model.train(training)
    _check_finite(results, num_generations)
    return [_response(result, prompts, sampling, i // num_generations) for i, result in enumerate(results)]


def _engine(
    model: PreTrainedModel, prompts: list[list[int]], sampling: SamplingParams, num_generations: int
) -> Engine:
    """With room for all responses at once. It lives for one call: training changes the weights after it."""
    n = len(prompts) * num_generations
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    return Engine(
        model, max_batch=n, max_tokens=n * longest, prefill_chunk=PREFILL_CHUNK, prefix_cache_bytes=0
    )


def _requests(
    prompts: list[list[int]],
    sampling: SamplingParams,
    num_generations: int,
    generator: torch.Generator | None,
) -> list[Request]:
    n = len(prompts) * num_generations
    device = "cpu" if generator is None else generator.device
    seeds = torch.randint(2**62, (n,), generator=generator, device=device).tolist()
    params = [sampling.generation_params(seed) for seed in seeds]
    return [Request(prompts[i // num_generations], one) for i, one in enumerate(params)]


def _response(result: Result, prompts: list[list[int]], sampling: SamplingParams, group: int) -> Response:
    return Response(
        prompt=list(prompts[group]),
        tokens=torch.tensor(result.tokens, dtype=torch.long),
        log_probs=torch.tensor(result.log_probs),
        finish_reason=str(result.finish_reason),
        temperature=sampling.temperature,
        group=group,
        routed_experts=result.routed_experts,
    )


def _check_finite(results: list[Result], num_generations: int) -> None:
    broken = [i for i, result in enumerate(results) if result.finish_reason == "error"]
    if broken:
        step = min(len(results[i].tokens) for i in broken)
        failed = [i for i in broken if len(results[i].tokens) == step]
        prompts = sorted({i // num_generations for i in failed})
        raise FloatingPointError(
            f"logits are not finite at new token {step} of responses {failed[:10]}, to prompts {prompts[:10]}"
        )
