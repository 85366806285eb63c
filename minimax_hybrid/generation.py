"""Generation: what the model adds to transformers' `generate`.

- the cache of a hybrid model, under the name the installed transformers uses;
- the repetition stop of the M1 report (section 3.2): a sequence ends when 3,000 tokens in a row each had a
  probability above 0.99. transformers hands probabilities to a stopping criterion only on request, so a
  logits processor keeps the last distribution and the criterion looks the chosen token up in it;
- why each sequence ended.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from .cache import HybridCache
from .compat import CACHE_NAME


class RepetitionStop(StoppingCriteria):
    """Ends a sequence after `run` consecutive tokens whose own probability is above `threshold` (strictly).

    The probability is the model's, over the full vocabulary and before temperature, top-k or top-p. Pass it
    to `generate(..., repetition_stop=RepetitionStop())`; afterwards `stopped` (B,) tells which sequences it
    ended.
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
        self._length: Tensor | None = None
        self._log_probs: Tensor | None = None

    def watch(self, log_probs: Tensor) -> None:
        """Note the distribution (B, V) from which the next token is drawn."""
        self._log_probs = log_probs

    def count(self, probability: Tensor) -> Tensor:
        """Enter the probability (B,) of the token just chosen; returns which sequences (B,) are to stop."""
        if self._length is None:
            self._length = torch.zeros_like(probability, dtype=torch.int64)
            self.stopped = torch.zeros_like(probability, dtype=torch.bool)
        self._length = torch.where(probability > self.threshold, self._length + 1, 0)
        self.stopped = self.stopped | (self._length >= self.run)
        return self.stopped

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:
        chosen = self._log_probs.gather(-1, input_ids[:, -1:]).squeeze(-1)
        return self.count(chosen.exp())


class _Watcher(LogitsProcessor):
    def __init__(self, stop: RepetitionStop):
        self.stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.stop.watch(scores.float().log_softmax(dim=-1))
        return scores


class HybridGenerationMixin:
    """`generate` for a model with a `HybridCache`; comes before transformers' own mixin."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True  # transformers says no to every class with "minimax" in its name

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode, batch_size: int, *args: Any
    ) -> None:
        given = generation_config.cache_implementation
        if given not in (None, "dynamic", "hybrid"):
            raise ValueError(
                f"cache_implementation is {given!r}; this model generates with its own HybridCache"
            )
        if model_kwargs.get(CACHE_NAME) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = HybridCache(self.config)
        generation_config.cache_implementation = None
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, *args
        )

    def generate(self, *args: Any, repetition_stop: RepetitionStop | None = None, **kwargs: Any):
        """transformers' `generate`, with the cache under either name and an optional repetition stop.

        Raises:
            ValueError: drafts longer than the cache can take back, or a repetition stop with beams.
        """
        for name in ("cache", "past_key_values"):
            if name != CACHE_NAME and kwargs.get(name) is not None:
                kwargs[CACHE_NAME] = kwargs.pop(name)
        self._check_drafts(kwargs)
        if repetition_stop is not None:
            config = kwargs.get("generation_config") or self.generation_config
            if (kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1) > 1:
                raise ValueError(
                    "the repetition stop follows one sequence; it cannot be used with num_beams above 1"
                )
            repetition_stop.reset()
            processors = list(kwargs.pop("logits_processor", None) or [])
            kwargs["logits_processor"] = LogitsProcessorList([_Watcher(repetition_stop), *processors])
            criteria = list(kwargs.pop("stopping_criteria", None) or [])
            kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, repetition_stop])
        return super().generate(*args, **kwargs)

    def _check_drafts(self, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get(CACHE_NAME)
        limit = cache.rows_kept if isinstance(cache, HybridCache) else HybridCache(self.config).rows_kept
        config = kwargs.get("generation_config") or self.generation_config
        assistant = kwargs.get("assistant_model")
        drafts = {
            "prompt_lookup_num_tokens": kwargs.get("prompt_lookup_num_tokens")
            or config.prompt_lookup_num_tokens
        }
        if assistant is not None:
            drafts["num_assistant_tokens"] = assistant.generation_config.num_assistant_tokens
        for name, tokens in drafts.items():
            if tokens is not None and tokens > limit:
                raise ValueError(
                    f"{name} is {tokens}; the cache can take back drafts of at most {limit} tokens"
                )


def finish_reasons(
    new_tokens: Tensor,
    *,
    end_tokens: int | Iterable[int] | None,
    repetition_stop: RepetitionStop | None = None,
) -> list[str]:
    """Why each of B generated rows (B, T, without the prompt) ended: "end", "repetition" or "length"."""
    ends = [end_tokens] if isinstance(end_tokens, int) else list(end_tokens or [])
    ended = torch.isin(new_tokens, torch.tensor(ends, device=new_tokens.device, dtype=new_tokens.dtype)).any(
        -1
    )
    stopped = repetition_stop.stopped if repetition_stop is not None else None
    repeated = torch.zeros_like(ended) if stopped is None else stopped
    return [
        "end" if e else "repetition" if r else "length"
        for e, r in zip(ended.tolist(), repeated.tolist(), strict=True)
    ]
