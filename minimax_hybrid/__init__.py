"""Hybrid lightning-attention models: load, generate, measure, train.

Importing this package registers `minimax_m1` and `minimax_text_01` with transformers' Auto classes. Neither
torch nor transformers is imported before it is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .auto_classes import register_when_loaded

if TYPE_CHECKING:
    from .cache import HybridCache
    from .config import MiniMaxM1Config, MiniMaxText01Config
    from .generation import RepetitionStop, finish_reasons
    from .model import MiniMaxM1ForCausalLM, MiniMaxM1Model, MiniMaxText01ForCausalLM, MiniMaxText01Model

__all__ = [
    "HybridCache",
    "MiniMaxM1Config",
    "MiniMaxM1ForCausalLM",
    "MiniMaxM1Model",
    "MiniMaxText01Config",
    "MiniMaxText01ForCausalLM",
    "MiniMaxText01Model",
    "RepetitionStop",
    "finish_reasons",
]
_MODULES = {
    "HybridCache": "cache",
    "MiniMaxM1Config": "config",
    "MiniMaxText01Config": "config",
    "RepetitionStop": "generation",
    "finish_reasons": "generation",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES.get(name, 'model')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_when_loaded()
