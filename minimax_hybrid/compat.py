"""What differs between the supported versions of transformers, in one place.

Up to 5.2x a forward takes and returns its cache as `past_key_values`; from 5.24 the name is `cache`. We take
both and return an output that answers to both.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

CACHE_NAME = "cache" if "cache" in MoeModelOutputWithPast.__dataclass_fields__ else "past_key_values"
MASK_CACHE_NAME = (
    "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
)


@dataclass
class HybridModelOutput(MoeModelOutputWithPast):
    """Hidden states (B, T, M), and on request the cache, router logits and routed experts (B, T, L, A)."""

    routed_experts: Tensor | None = None

    if CACHE_NAME != "cache":

        @property  # type: ignore[misc]
        def cache(self) -> Any:  # type: ignore[override]
            return self.past_key_values


@dataclass
class HybridCausalLMOutput(MoeCausalLMOutputWithPast):
    """Logits (B, T, V), and on request the loss, the cache, router logits and routed experts (B, T, L, A).

    `log_probs` and `entropies` (B, T) stand in the place of logits where `forward` was asked for a score.
    """

    routed_experts: Tensor | None = None
    log_probs: Tensor | None = None
    entropies: Tensor | None = None

    if CACHE_NAME != "cache":

        @property  # type: ignore[misc]
        def cache(self) -> Any:  # type: ignore[override]
            return self.past_key_values
