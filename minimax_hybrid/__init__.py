"""Hybrid lightning-attention models: load, generate, measure, train.

Importing this package registers `minimax_m1` and `minimax_text_01` with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import HybridCache
from .checkpoint.loading import register_layouts
from .config import MiniMaxM1Config, MiniMaxText01Config
from .generation import RepetitionStop, finish_reasons
from .model import MiniMaxM1ForCausalLM, MiniMaxM1Model, MiniMaxText01ForCausalLM, MiniMaxText01Model

for _config, _base, _causal in (
    (MiniMaxM1Config, MiniMaxM1Model, MiniMaxM1ForCausalLM),
    (MiniMaxText01Config, MiniMaxText01Model, MiniMaxText01ForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _base, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal, exist_ok=True)
register_layouts("minimax_m1", "minimax_text_01")

__all__ = [
    "HybridCache",
    "MiniMaxM1Config",
    "MiniMaxM1ForCausalLM",
    "MiniMaxM1Model",
    "MiniMaxText01Config",
    "MiniMaxText01ForCausalLM",
    "RepetitionStop",
    "finish_reasons",
]
