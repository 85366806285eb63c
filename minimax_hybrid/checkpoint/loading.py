"""From a published checkpoint to a model: compare first, then load, and use every tensor exactly once.

What the headers of the shards hold is compared with what the config asks for before anything is loaded
(`headers.py` knows the layouts). transformers then converts shard by shard, so a model is never held
twice; the converters at the end of this file tell it how experts are stacked.
"""

import copy
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from ..config import MiniMaxM1Config
from .headers import (
    INDEX,
    SINGLE,
    TensorInfo,
    is_derived,
    parts_of,
    published_name,
    read_headers,
    stacked_place,
    with_variant,
)

_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HEAD = "lm_head."
_MLP = {r"\.mlp\.": ".block_sparse_moe."}  # transformers' name of the experts, and the release's


@dataclass
class Mismatch:
    """How a checkpoint differs from the model it is for; names are the published ones.

    incomplete_stacks: of stacked experts that are incomplete, the parts that are there: our name of the
        stack, then the published name of the part and its name on disk.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    incomplete_stacks: dict[str, dict[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def describe(self, tensors: dict[str, TensorInfo]) -> str:
        lines = [f"missing: {name}" for name in self.missing]
        lines += [f"unexpected: {name} (in {tensors[name].file})" for name in self.unexpected]
        lines += [
            f"shape: {name} (in {tensors[name].file}) is {found}, the config asks for {wanted}"
            for name, found, wanted in self.mismatched
        ]
        shown = lines[:20] + ([f"... and {len(lines) - 20} more"] if len(lines) > 20 else [])
        return "\n  ".join(shown)


@dataclass(frozen=True)
class LoadPlan:
    """What `from_pretrained` gives to transformers, and what is compared with the result afterwards.

    folder: where the weights lie; None where they come from elsewhere and were not compared beforehand.
    """

    path: str | os.PathLike | None
    strict: bool
    options: dict[str, Any]
    folder: Path | None = None
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    difference: Mismatch = field(default_factory=Mismatch)


def plan_load(
    cls: type[PreTrainedModel], path: str | os.PathLike | None, options: Mapping[str, Any], *, strict: bool
) -> LoadPlan:
    """Compare names and shapes before a weight is read; see `HybridPreTrainedModel.from_pretrained`.

    Memory: the model once, beside the file's mapped pages. Another `dtype` than the file's takes up to twice
    the model, since transformers' threads cast every expert before the first are stacked (its own variable
    HF_DEACTIVATE_ASYNC_LOAD=1 prevents that: 1.25 times).
    """
    _check_config(cls, options.get("config"))
    folder = _weights_folder(path, options)
    if folder is None:
        defaults = {"key_mapping": dict(_MLP)} | ({} if strict else {"ignore_mismatched_sizes": True})
        return LoadPlan(path, strict, {**defaults, **options})
    tensors = read_headers(folder, variant=options.get("variant"))
    config = _config_for(cls, folder, options)
    difference = compare(tensors, model_on_meta(cls, config))
    fatal = replace(difference, mismatched=[]) if options.get("ignore_mismatched_sizes") else difference
    if strict and fatal:
        raise ValueError(
            f"{folder} does not hold the weights of this config (strict=False loads what fits):\n  "
            + fatal.describe(tensors)
        )
    changed = {
        **_with_dtype(options, config, tensors),
        "key_mapping": {**_renames_hiding_incomplete(difference), **_MLP},
        "ignore_mismatched_sizes": bool(difference),
    }
    return LoadPlan(path, strict, changed, folder, tensors, difference)


def complete_load(model: nn.Module, info: dict[str, Any], plan: LoadPlan) -> None:
    """Repair or refuse what transformers loaded, and bring its loading info in line with the comparison."""
    # what is saved has the published names, whichever layout was read
    if hasattr(model, "_weight_conversions"):
        del model._weight_conversions
    if plan.folder is None:
        if plan.strict and plan.path is not None:
            _refuse_differences(info, plan.path)
        return
    difference = plan.difference
    _fill_incomplete_stacks(model, plan.folder, plan.tensors, difference)
    if difference:
        warnings.warn(
            f"{plan.folder} does not fit its config: what fits was loaded, the rest initialised\n  "
            + difference.describe(plan.tensors),
            stacklevel=3,
        )
    info["missing_keys"] = set(difference.missing)
    info["unexpected_keys"] = set(difference.unexpected)
    info["mismatched_keys"] = set(difference.mismatched)


def model_on_meta(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """The model without memory for its weights: names and shapes only."""
    with torch.device("meta"):
        return cls(copy.deepcopy(config))


def main_dtype(tensors: dict[str, TensorInfo]) -> torch.dtype | None:
    """The type that most bytes of a checkpoint have; None if it is none of ours."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.bytes
    return _TYPES.get(sizes.most_common(1)[0][0]) if sizes else None


def published_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that `save_pretrained` writes: experts apart, a tied head left out."""
    tied = getattr(model, "all_tied_weights_keys", {})
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            shapes |= parts_of(name, tuple(tensor.shape))
    return shapes


def compare(tensors: dict[str, TensorInfo], model: PreTrainedModel) -> Mismatch:
    """What of a checkpoint does not fit a model.

    Both layouts of experts are legal, and so are a whole model's checkpoint for the stack without its head,
    and the stack's for the whole model (whose head is then missing unless it is tied).
    """
    difference = Mismatch()
    found = _published(tensors, model, difference)
    used: set[str] = set()
    tied = _tied_groups(model)
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        parts = {name: shape} if name in found else parts_of(name, shape)
        wrong = []
        for part, wanted in parts.items():
            if part not in found:
                if not any(twin in found for twin in tied.get(part, ())):
                    wrong.append(part)
                    difference.missing.append(part)
                continue
            used.add(part)
            if tensors[found[part]].shape != wanted:
                wrong.append(part)
                difference.mismatched.append((found[part], tensors[found[part]].shape, wanted))
        if wrong and len(parts) > 1:
            difference.incomplete_stacks[name] = {
                part: found[part] for part in parts if part in found and part not in wrong
            }
    difference.unexpected += [disk for name, disk in found.items() if name not in used]
    return difference


def _published(
    tensors: dict[str, TensorInfo], model: PreTrainedModel, difference: Mismatch
) -> dict[str, str]:
    """The tensors on disk by the names that `model` would publish them under."""
    found: dict[str, str] = {}
    for disk in tensors:
        name = published_name(disk)
        if is_derived(disk):
            continue
        if name in found:  # the same weight in both layouts
            difference.unexpected.append(disk)
        else:
            found[name] = disk
    prefix = model.base_model_prefix + "."
    whole = any(name.startswith(prefix) for name in found)
    if not hasattr(model, model.base_model_prefix):
        if not whole:
            return found
        return {name.removeprefix(prefix): disk for name, disk in found.items() if not name.startswith(_HEAD)}
    if whole:
        return found
    return {name if name.startswith(_HEAD) else prefix + name: disk for name, disk in found.items()}


def _tied_groups(model: nn.Module) -> dict[str, list[str]]:
    """For each tied name, the others that hold the same weight: one of them in the file is enough."""
    tied = getattr(model, "all_tied_weights_keys", {})
    groups: dict[str, list[str]] = {}
    for name, source in tied.items():
        groups.setdefault(name, []).append(source)
        groups.setdefault(source, []).append(name)
    return groups


def _renames_hiding_incomplete(difference: Mismatch) -> dict[str, str]:
    """Renamings that keep incomplete stacks of experts from transformers, which could not stack them."""
    renamings = {}
    for name in difference.incomplete_stacks:
        experts, _, kind = name.rpartition(".")
        parts = "w2" if kind == "down_proj" else "w[13]"
        path = re.escape(experts.removeprefix("model."))
        path = path.replace("block_sparse_moe", "(?:block_sparse_moe|mlp)")
        renamings[rf"(?<![^.]){path}\.\d+\.{parts}\.weight"] = f"incomplete.{name}"
    return renamings


@torch.no_grad()
def _fill_incomplete_stacks(
    model: nn.Module, folder: Path, tensors: dict[str, TensorInfo], difference: Mismatch
) -> None:
    """Put the experts that are there into stacks that were initialised because others are absent."""
    for name, parts in difference.incomplete_stacks.items():
        stack = model.get_parameter(name)
        for part, disk in parts.items():
            place = stacked_place(part)
            assert place is not None
            _, e, which = place
            half = stack.shape[1] // 2
            part_of_stack = {"w1": slice(0, half), "w3": slice(half, None), "w2": slice(None)}[which]
            with safe_open(folder / tensors[disk].file, "pt") as file:
                stack[e, part_of_stack].copy_(file.get_tensor(disk))


def _check_config(cls: type[PreTrainedModel], config: Any) -> None:
    if isinstance(config, PreTrainedConfig) and not isinstance(config, MiniMaxM1Config):
        kind, ours = type(config).__name__, _config_class(cls).__name__
        raise ValueError(
            f"the config is a {kind} and {cls.__name__} takes a {ours}; "
            f"{ours}.from_dict(config.to_dict()) reads either spelling"
        )


def _config_for(cls: type[PreTrainedModel], folder: Path, options: Mapping[str, Any]) -> MiniMaxM1Config:
    """The config that `from_pretrained` will build the model from, so that the same thing is compared."""
    config = options.get("config")
    if isinstance(config, MiniMaxM1Config):
        return config
    changes = {name: value for name, value in options.items() if name not in ("config", "subfolder", "dtype")}
    source = folder if config is None else config
    if config is None and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; it belongs beside the weights")
    read: Any = _config_class(cls).from_pretrained(source, return_unused_kwargs=True, **changes)
    return read[0]


def _config_class(cls: type[PreTrainedModel]) -> type[MiniMaxM1Config]:
    return cls.config_class  # type: ignore[return-value]


def _with_dtype(
    options: Mapping[str, Any], config: MiniMaxM1Config, tensors: dict[str, TensorInfo]
) -> dict[str, Any]:
    """The options; where neither caller nor config names a type, with the main one. transformers would take
    that of the first tensor, and a float32 router that comes first would double the memory of the model."""
    asked = options.get("dtype") or options.get("torch_dtype") or "auto"
    main = main_dtype(tensors)
    if asked != "auto" or config.dtype is not None or main is None:
        return dict(options)
    return {name: value for name, value in options.items() if name != "torch_dtype"} | {"dtype": main}


def _weights_folder(path: str | os.PathLike | None, options: Mapping[str, Any]) -> Path | None:
    """The local folder whose weights will be loaded; None where they come from elsewhere or are renamed."""
    elsewhere = ("state_dict", "gguf_file", "quantization_config", "key_mapping")
    if path is None or any(options.get(name) is not None for name in elsewhere):
        return None
    folder = Path(path) / (options.get("subfolder") or "")
    if not folder.is_dir():
        if folder.is_absolute() or os.fspath(path).startswith((".", "~")):
            raise FileNotFoundError(f"there is no folder {folder}")
        return None
    adapter = folder / "adapter_config.json"
    names = (with_variant(name, options.get("variant")) for name in (SINGLE, INDEX))
    if adapter.is_file() and not any((folder / name).is_file() for name in names):
        base = Path(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
        return base if base.is_dir() else None
    return folder


def _refuse_differences(info: dict[str, Any], path: str | os.PathLike) -> None:
    """Raise a ValueError where transformers' own lists say that names or shapes differ."""
    wrong = {name: sorted(map(str, info[f"{name}_keys"])) for name in ("missing", "unexpected", "mismatched")}
    wrong["unexpected"] = [name for name in wrong["unexpected"] if not is_derived(name)]
    if any(wrong.values()):
        raise ValueError(
            f"{path} does not hold the weights of its config (strict=False loads what fits): {wrong}"
        )


# tells transformers how experts are stacked on loading and taken apart on saving
for _layout in ("minimax_m1", "minimax_text_01"):
    register_checkpoint_conversion_mapping(
        _layout,
        [
            WeightConverter(
                [".experts.*.w1.weight", ".experts.*.w3.weight"],
                ".experts.gate_up_proj",
                [MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(".experts.*.w2.weight", ".experts.down_proj", [MergeModulelist(dim=0)]),
        ],
        overwrite=True,
    )
