"""What differs between the supported versions of transformers, in one place.

Up to 5.2x a forward takes and returns its cache as `past_key_values`; from 5.24 the name is `cache`. We take
both and return an output that answers to both.
"""

import inspect

from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

CACHE_NAME = "cache" if "cache" in MoeModelOutputWithPast.__dataclass_fields__ else "past_key_values"
MASK_CACHE_NAME = (
    "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
)


class HybridModelOutput(MoeModelOutputWithPast):
    """Hidden states (B, T, M), and on request the cache and every layer's router logits (N, E)."""

    if CACHE_NAME != "cache":

        @property
        def cache(self):
            return self.past_key_values


class HybridCausalLMOutput(MoeCausalLMOutputWithPast):
    """Logits (B, T, V), and on request the loss, the cache and every layer's router logits (N, E)."""

    if CACHE_NAME != "cache":

        @property
        def cache(self):
            return self.past_key_values
