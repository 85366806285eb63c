"""FSDP2 for training: every rank holds a part of each parameter and gathers a layer while it computes it."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(
    model: nn.Module, *, mesh: DeviceMesh | None = None, mp_policy: MixedPrecisionPolicy | None = None
) -> nn.Module:
    """`fully_shard` for a model of ours, in place: what has another type first, then layers, then the root.

    The same numbers as the plain loop over layers; by public calls alone, so it works under every supported
    PyTorch, and inside a wrapper that is the root itself.
    """
    options: dict[str, Any] = {"mp_policy": mp_policy or MixedPrecisionPolicy()}
    if mesh is not None:
        options["mesh"] = mesh
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        fully_shard(layer.block_sparse_moe.gate, **options)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model
