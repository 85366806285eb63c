"""`import minimax_hybrid` is cheap, and registers the Auto classes in whatever order it is imported."""

import subprocess
import sys

import pytest

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM

MODEL = """
from minimax_hybrid import MiniMaxM1Config, MiniMaxText01Config
for kind in (MiniMaxM1Config, MiniMaxText01Config):
    config = AutoConfig.for_model(kind.model_type, **SIZES)
    assert type(config) is kind
    assert AutoModelForCausalLM.from_config(config).config_class is kind
    assert AutoModel.from_config(config).config_class is kind
"""
SIZES = (
    "SIZES = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, head_dim=4, "
    "num_attention_heads=2, num_local_experts=2)\n"
)
AUTO = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM\n"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import minimax_hybrid; " + AUTO,
        AUTO + "import minimax_hybrid",
        "import minimax_hybrid; from transformers import LlamaForCausalLM; " + AUTO,
        "import minimax_hybrid; from transformers import AutoTokenizer; " + AUTO,
        "import minimax_hybrid.model; " + AUTO,
        "import minimax_hybrid.chunked_prefill; " + AUTO,
        "from minimax_hybrid.cache import HybridCache; " + AUTO,
        "import minimax_hybrid; from transformers import pipeline, Trainer; " + AUTO,
    ],
)
@pytest.mark.slow
def test_the_auto_classes_build_the_models_whatever_is_imported_first(imports):
    run_python(f"{imports}\n{SIZES}{MODEL}")


def test_a_checkpoint_of_the_package_loads_through_the_auto_class(tiny_folder):
    run_python(
        "import minimax_hybrid; from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tiny_folder)!r})\n"
        "assert type(model).__name__ == 'MiniMaxM1ForCausalLM'"
    )


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    MiniMaxM1ForCausalLM(MiniMaxM1Config.tiny(num_hidden_layers=2)).save_pretrained(folder)
    return folder


CLAIMS = {
    "AutoConfig alone knows the model types":
        "import minimax_hybrid; from transformers import AutoConfig\n"
        "assert type(AutoConfig.for_model('minimax_m1')).__name__ == 'MiniMaxM1Config'",
    "the package and its command line import neither torch nor transformers":
        "import sys, minimax_hybrid, minimax_hybrid.cli\n"
        "assert not {'torch', 'transformers'} & {*sys.modules}",
    "objective and advantages import neither transformers nor the model":
        "import sys, minimax_hybrid.rl.advantages, minimax_hybrid.rl.objective\n"
        "assert not {'transformers', 'minimax_hybrid.model'} & {*sys.modules}",
    "loading a tokenizer imports no cost report":
        "import sys, minimax_hybrid.text\n"
        "assert not [name for name in sys.modules if name.startswith('minimax_hybrid.cost')]",
    "every public name is there and no other":
        "import minimax_hybrid\n"
        "assert {*minimax_hybrid.__all__} <= {*dir(minimax_hybrid)}\n"
        "assert all(getattr(minimax_hybrid, name).__name__ == name for name in minimax_hybrid.__all__)\n"
        "assert not hasattr(minimax_hybrid, 'absent')",
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_in_a_new_process(claim):
    run_python(CLAIMS[claim])


@pytest.mark.parametrize("command", [[], ["generate"], ["inspect"], ["convert"], ["cost"], ["train"]])
def test_help_imports_no_torch(command):
    out = run_python(
        "import sys; from minimax_hybrid.cli import main\n"
        f"try: main({[*command, '--help']})\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    assert " ".join(["usage: minimax-hybrid", *command]) in out
