"""Register our models with transformers' Auto classes, without importing transformers for it.

Where the Auto classes are loaded already, this happens at once. Otherwise a finder waits for their modules
and registers as soon as no module that the model is built from is still being imported.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __name__.rpartition(".")[0]
_CONFIGS = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.models.auto.modeling_auto"
_LAYERS = "transformers.modeling_layers"  # imports the Auto classes, and our model imports it


class _RegisterAfterImport(MetaPathFinder):
    """Finds nothing itself: lets the other finders look, and notes when watched modules are loaded."""

    def __init__(self) -> None:
        self.being_imported = 0
        self.pending = {_CONFIGS: _register_configs, _MODELS: _register_models}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (_CONFIGS, _MODELS, _LAYERS) and not fullname.startswith(f"{_PACKAGE}."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self.being_imported += 1
                try:
                    execute(module)
                finally:
                    self.being_imported -= 1
                self.register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def register(self) -> None:
        """Register what is pending and possible now; stop watching once nothing is pending."""
        if self.being_imported:
            return
        for module in [name for name in self.pending if name in sys.modules]:
            work = self.pending.pop(module, None)  # gone if an import below has done it
            if work is not None:
                work()
        if not self.pending and self in sys.meta_path:
            sys.meta_path.remove(self)


def register_when_loaded() -> None:
    """Register configurations and models, now or when transformers' Auto classes are imported."""
    finder = _RegisterAfterImport()
    sys.meta_path.insert(0, finder)
    finder.register()


def _register_configs() -> None:
    from transformers import AutoConfig

    from .config import MiniMaxM1Config, MiniMaxText01Config

    for config in (MiniMaxM1Config, MiniMaxText01Config):
        AutoConfig.register(config.model_type, config, exist_ok=True)


def _register_models() -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    from .model import MiniMaxM1ForCausalLM, MiniMaxM1Model, MiniMaxText01ForCausalLM, MiniMaxText01Model

    for stack in (MiniMaxM1Model, MiniMaxText01Model):
        AutoModel.register(stack.config_class, stack, exist_ok=True)
    for model in (MiniMaxM1ForCausalLM, MiniMaxText01ForCausalLM):
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
