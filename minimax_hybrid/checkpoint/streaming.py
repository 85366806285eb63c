"""The policy's weights on their way to an inference engine."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


@torch.no_grad()
def published_weights(
    model: PreTrainedModel, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every weight under the name that the release uses and that vLLM and SGLang load, one parameter at a
    time.

    The same names and values as `save_pretrained` writes: experts apart, a tied head left out. A head that
    training keeps in a wider type comes in that type, unless `dtype` says otherwise. Memory beyond the
    model's is one layer's experts.

    Args:
        dtype: convert to it on the way, except routers, which the release stores in float32.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        if dtype is not None and not name.endswith("block_sparse_moe.gate.weight"):
            tensor = tensor.to(dtype)
        yield from revert_weight_conversion(model, {name: tensor}).items()
