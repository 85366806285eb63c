"""FSDP2 on a model of two types: routers (and a trained head) are float32 in a bfloat16 model.

`fully_shard(layer)` puts all parameters of a layer into one group, and a group that trains has one type.
FSDP2 itself lets a module have several groups, each gathered and reduced by itself; so before the first
forward pass a group of two types becomes two groups.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def separate_dtypes(model: nn.Module) -> None:
    """Divide the groups of a model to which `fully_shard` was applied, so that each has one type.

    Does nothing after the first forward pass, and nothing to a model that is not sharded.

    Raises:
        ValueError: a group of two types under a PyTorch whose modules have one group each.
    """
    if not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is not None:
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _separate(module)


def _separate(module: FSDPModule) -> None:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = state._fsdp_param_group
        if group is not None and len(_by_dtype(group)) > 1:
            raise ValueError(
                f"{type(module).__name__} holds parameters of {_names(group)}, and FSDP of PyTorch "
                f"{torch.__version__} takes one type a call; use minimax_hybrid.parallel.fsdp.shard(model)"
            )
        return
    state._fsdp_param_groups = [part for group in groups for part in _divided(group)]


def _divided(group: Any) -> list[Any]:
    parts = _by_dtype(group)
    if len(parts) < 2:
        return [group]
    divided = []
    for params in parts.values():
        part = copy.copy(group)
        part.fsdp_params, part._post_forward_indices = params, []
        # what a group keeps for itself
        part._module_to_pre_save_state_dict_hook_handle = {}
        part._module_to_pre_load_state_dict_hook_handle = {}
        divided.append(part)
    return divided


def _by_dtype(group: Any) -> dict[torch.dtype, list[Any]]:
    parts = defaultdict(list)
    for param in group.fsdp_params:
        parts[param.sharded_param.dtype].append(param)
    return parts


def _names(group: Any) -> str:
    return " and ".join(sorted(str(dtype) for dtype in _by_dtype(group)))
