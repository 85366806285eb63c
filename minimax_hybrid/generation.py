"""Generation: what the model adds to transformers' `generate`.

- the cache of a hybrid model, under the name the installed transformers uses;
- prompts with padding behind their tokens: the state continues from the last token, wherever it lies;
- the repetition stop of the M1 report (section 3.2): a sequence ends when 3,000 tokens in a row each had a
  probability above 0.99. transformers hands probabilities to a stopping criterion only on request, so the
  first logits processor keeps the last distribution and the criterion looks the chosen token up in it;
- why each sequence ended.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .cache import MAX_ROLLBACK, HybridCache
from .compat import CACHE_NAME
from .config import MiniMaxM1Config


class RepetitionStop(StoppingCriteria):
    """Ends a sequence after `run` consecutive tokens whose own probability is above `threshold` (strictly).

    The probability is the model's, over the full vocabulary and before temperature, top-k, top-p or any
    penalty. Pass it to `generate(..., repetition_stop=RepetitionStop())`; afterwards `stopped` (B,) says
    which sequences it ended, and `stopped_after` (B,) after how many new tokens (0 for none).
    """

    def __init__(self, *, run: int = 3000, threshold: float = 0.99):
        if run < 1:
            raise ValueError(f"run is {run}; a run of tokens has at least 1")
        if not 0 < threshold < 1:
            raise ValueError(f"threshold is {threshold}; a probability to exceed lies between 0 and 1")
        self.run, self.threshold = run, threshold
        self.reset()

    def reset(self) -> None:
        self.stopped: Tensor | None = None
        self.stopped_after: Tensor | None = None
        self._length: Tensor | None = None
        self._tokens = 0
        self._probabilities: Tensor | None = None

    def watch(self, logits: Tensor) -> None:
        """Note the logits (B, V) that the next token is drawn from."""
        self._probabilities = logits.float().softmax(dim=-1)

    def count(self, probability: Tensor) -> Tensor:
        """Enter the probability (B,) of the token just chosen; returns which sequences (B,) are to stop."""
        if self._length is None or self.stopped is None or self.stopped_after is None:
            self._length = torch.zeros_like(probability, dtype=torch.int64)
            self.stopped = torch.zeros_like(probability, dtype=torch.bool)
            self.stopped_after = torch.zeros_like(self._length)
        self._tokens += 1
        self._length = torch.where(probability > self.threshold, self._length + 1, 0)
        reached = ~self.stopped & (self._length >= self.run)
        self.stopped_after = self.stopped_after.masked_fill(reached, self._tokens)
        self.stopped = self.stopped | reached
        return self.stopped

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:
        if self._probabilities is None:
            raise ValueError("a RepetitionStop sees no logits; pass it as generate(repetition_stop=...)")
        return self.count(self._probabilities.gather(-1, input_ids[:, -1:]).squeeze(-1))


class _LogitsWatcher(LogitsProcessor):
    def __init__(self, stop: RepetitionStop):
        self.stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.stop.watch(scores)
        return scores


class HybridGenerationMixin(GenerationMixin):
    """`generate` for a model with a `HybridCache`."""

    config: MiniMaxM1Config

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True  # transformers says no to every class with "minimax" in its name

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *args: Any,
    ) -> Any:
        given = generation_config.cache_implementation
        if given not in (None, "dynamic", "hybrid"):
            raise ValueError(
                f"cache_implementation is {given!r}; this model generates with its own HybridCache"
            )
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2 and not bool((mask[:, -1] != 0).all()):
            wrong = (mask[:, -1] == 0).nonzero().flatten().tolist()
            raise ValueError(
                f"sequences {wrong} end in padding or are nothing else, and generation continues from the "
                "last position; give attention_mask with each prompt's tokens and no cache, or pad on the "
                "left (tokenizer.padding_side = 'left')"
            )
        if model_kwargs.get(CACHE_NAME) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = HybridCache(self.config)
            if generation_config.is_assistant:
                model_kwargs[CACHE_NAME].activate_past_recording()
        generation_config.cache_implementation = None
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, *args
        )

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """A repetition stop watches the model's own distribution, so it comes before every processor."""
        processors = super()._get_logits_processor(*args, **kwargs)  # type: ignore[misc]
        return LogitsProcessorList(sorted(processors, key=lambda one: not isinstance(one, _LogitsWatcher)))

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: PreTrainedModel | None = None,
        *args: Any,
        repetition_stop: RepetitionStop | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, with the cache under either name and an optional repetition stop.

        Prompts may be padded on either side if `attention_mask` says where: each gives the tokens that it
        gives alone, and comes back as it was, padding included, followed by its new tokens. Padding on the
        right is moved to the left meanwhile, so cache, scores and hidden states come back in that layout.

        Raises:
            ValueError: drafts longer than the cache can take back, or a repetition stop with beams or drafts.
        """
        for name in ("cache", "past_key_values"):
            if name != CACHE_NAME and kwargs.get(name) is not None:
                kwargs[CACHE_NAME] = kwargs.pop(name)

        def setting(name: str) -> Any:
            """The value in force: the call's own, else the given configuration's, else the model's."""
            values = (getattr(config, name, None) for config in (generation_config, self.generation_config))
            return next((value for value in (kwargs.get(name), *values) if value is not None), None)

        drafted = self._check_drafts(setting, assistant_model, kwargs.get(CACHE_NAME))
        if repetition_stop is not None:
            if drafted or (setting("num_beams") or 1) > 1:
                raise ValueError(
                    "the repetition stop counts tokens one by one as they are chosen; it cannot be used with "
                    "num_beams above 1, an assistant model or prompt lookup"
                )
            repetition_stop.reset()
            watcher = _LogitsWatcher(repetition_stop)
            logits_processor = LogitsProcessorList([watcher, *(logits_processor or [])])
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), repetition_stop])
        given = kwargs.get("input_ids") if inputs is None else inputs
        order = _padding_first(kwargs.get("attention_mask"), kwargs.get(CACHE_NAME))
        if order is not None:
            inputs = None if inputs is None else _taken(inputs, order)
            for name in ("input_ids", "inputs_embeds", "position_ids", "attention_mask"):
                if kwargs.get(name) is not None:
                    kwargs[name] = _taken(kwargs[name], order)
        output = super().generate(
            inputs, generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn,
            synced_gpus, assistant_model, *args, **kwargs,
        )  # fmt: skip
        return output if order is None or given is None else _with_prompts(output, given)

    def _check_drafts(
        self, setting: Callable[[str], Any], assistant: PreTrainedModel | None, cache: HybridCache | None
    ) -> bool:
        """Whether tokens are drafted before they are chosen; a ValueError if the cache cannot undo them."""
        limit = cache.max_rollback if isinstance(cache, HybridCache) else MAX_ROLLBACK
        if setting("assistant_early_exit"):
            raise ValueError(
                "assistant_early_exit drafts with the first layers of this model, whose caches would then "
                "differ in length from the others; use assistant_model or prompt_lookup_num_tokens"
            )
        drafts = {"prompt_lookup_num_tokens": setting("prompt_lookup_num_tokens")}
        if assistant is not None:
            drafts["num_assistant_tokens"] = assistant.generation_config.num_assistant_tokens
        for name, tokens in drafts.items():
            if tokens is not None and tokens > limit:
                raise ValueError(
                    f"{name} is {tokens}; the cache can take back drafts of at most {limit} tokens"
                )
        return assistant is not None or drafts["prompt_lookup_num_tokens"] is not None


def _padding_first(mask: Tensor | None, cache: HybridCache | None) -> Tensor | None:
    """(B, T), for each sequence its columns with padding in front; None if no prompt ends in padding."""
    continued = cache is not None and cache.get_seq_length() > 0
    if mask is None or mask.ndim != 2 or continued or bool((mask[:, -1] != 0).all()):
        return None
    return (mask != 0).to(torch.int8).argsort(dim=1, stable=True)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """The positions of x (B or 1, T, ...) in another order (B, T)."""
    if x.shape[1] != order.shape[1] or x.shape[0] not in (1, len(order)):
        raise ValueError(
            f"attention_mask is {tuple(order.shape)} and the prompt {tuple(x.shape)}; give one mask value "
            "for each of its positions"
        )
    x, order = x.expand(len(order), *x.shape[1:]), order.to(x.device)
    return x[torch.arange(len(order), device=x.device)[:, None], order]


def _with_prompts(output: Any, prompts: Tensor) -> Any:
    """What `generate` returned, with the prompts (B, T) as they were given."""
    sequences = output if isinstance(output, Tensor) else output.sequences
    prompts = prompts.to(sequences.device).repeat_interleave(len(sequences) // len(prompts), dim=0)
    sequences = torch.cat([prompts, sequences[:, prompts.shape[1] :]], dim=1)
    if isinstance(output, Tensor):
        return sequences
    output.sequences = sequences
    return output


def finish_reasons(
    new_tokens: Tensor,
    *,
    end_tokens: int | Iterable[int] | None,
    repetition_stop: RepetitionStop | None = None,
) -> list[str]:
    """Why each of B generated sequences (B, T, without the prompt) ended: "end", "repetition" or "length".

    A sequence that the repetition stop ended is filled with padding, which is often an end token: what counts
    is which came first.
    """
    B, T = new_tokens.shape
    ends = [end_tokens] if isinstance(end_tokens, int) else list(end_tokens or [])
    ended = torch.isin(new_tokens, torch.tensor(ends, device=new_tokens.device, dtype=new_tokens.dtype))
    length_at_end = torch.where(ended.any(-1), ended.long().cumsum(-1).eq(0).sum(-1) + 1, T + 1).tolist()
    after = None if repetition_stop is None else repetition_stop.stopped_after
    length_at_stop = [n or T + 1 for n in ([0] * B if after is None else after.tolist())]
    return [
        "length" if min(end, stop) > T else "end" if end <= stop else "repetition"
        for end, stop in zip(length_at_end, length_at_stop, strict=True)
    ]
