"""What tensor parallelism needs for a lightning layer beyond transformers' own styles.

Its norm runs over the heads of all ranks, and the slopes of its heads belong to global head numbers.
Importing this module registers both styles with transformers, under the names that `plans.py` uses.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from minimax_kernels.backends import accumulation_dtype


class LightningHeads(TensorParallelLayer):
    """Sets which heads a lightning layer has; their slopes depend on it."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        if hasattr(module, "heads"):
            count = module.num_heads // mesh.size()
            module.heads = slice(mesh.get_local_rank() * count, (mesh.get_local_rank() + 1) * count)
        return module


class LightningNorm(TensorParallelLayer):
    """An RMSNorm over channels of all ranks: the weight is cut, the sum of squares is added up."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        weight = module.get_parameter(param)
        cut = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(cut, requires_grad=weight.requires_grad)

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        group = mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            weight = module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight
            wide = x.to(accumulation_dtype(x))
            squares = all_reduce(wide.square().sum(-1, keepdim=True), group=group)
            scale = torch.rsqrt(squares / (x.shape[-1] * mesh.size()) + module.eps)
            return (wide * scale).to(x.dtype) * weight

        module.forward = forward
        return module


_STYLES: dict[str, Any] = {"lightning_heads": LightningHeads(), "lightning_norm": LightningNorm()}
for _name, _style in _STYLES.items():
    ALL_PARALLEL_STYLES.register(_name, _style)
