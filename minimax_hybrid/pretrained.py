"""What transformers needs to know about the model: features, initial weights, strict loading."""

import os
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .checkpoint.headers import DERIVED
from .checkpoint.loading import complete_load, plan_load
from .config import MiniMaxM1Config
from .experts import Experts, Router
from .layers import RMSNorm
from .parallel.dtype_groups import separate_dtypes
from .parallel.plans import check_counts


class HybridPreTrainedModel(PreTrainedModel):
    """What transformers needs to know about the model."""

    config: MiniMaxM1Config
    config_class = MiniMaxM1Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["block_sparse_moe.gate"]  # the release stores its routers in float32
    _keys_to_ignore_on_load_unexpected = [DERIVED]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        separate_dtypes(self)
        return super().__call__(*args, **kwargs)

    @classmethod
    def maybe_distribute_model(
        cls, model: nn.Module, distributed_config: Any, mesh_manager: Any
    ) -> nn.Module:
        """Cut the model before its weights are read, as `distributed_config` asks."""
        from .parallel import tensor  # noqa: F401  (registers the styles of lightning layers)

        check_counts(
            model.config,
            tensor=distributed_config.tp_size,
            expert=distributed_config.ep_size,
            pipeline=distributed_config.pp_size,
        )
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights of `initializer_range`, norms of ones.

        No embedding row is zero, not even the padding token's: a zero vector multiplies gradients by
        1/sqrt(eps) in every norm and overflows float32 within eight layers.
        """
        std = self.config.initializer_range
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, (nn.Linear, nn.Embedding, Router)):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, Experts):
            nn.init.normal_(module.gate_up_proj, std=std)
            nn.init.normal_(module.down_proj, std=std)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        strict: bool = True,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a checkpoint in the published layout, sharded or not.

        With `strict`, names and shapes are compared from the shard headers before anything is loaded. Without
        it what fits is loaded, the rest initialised, warned of, and listed with `output_loading_info=True`.

        Raises:
            ValueError: tensors that do not fit, each with its file and shapes; a damaged file.
            FileNotFoundError: weights or shards that are not there.
        """
        plan = plan_load(cls, pretrained_model_name_or_path, kwargs, strict=strict)
        options = plan.options | {"output_loading_info": True}
        loaded: Any = super().from_pretrained(plan.path, *model_args, **options)
        model, info = loaded
        complete_load(model, info, plan)
        return (model, info) if output_loading_info else model
