"""One module a case. The runner reads from it, the first two always:

ABOUT      one sentence, a plain string: it is listed without importing the module
TESTS      arguments of pytest, all of which must pass before anything is measured
options    adds the case's own arguments to a parser
run        yields `Row`s as they are measured; instead of it, a comparison of sides has
           SIDES, TASKS, QUICK and prepare(side, task), see `harness.measure.timed`
table      the rows as a markdown table; `harness.pages.case_table` without it
draw       a picture of the rows
"""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

CASES = {
    "native": "vs_transformers",
    "twin": "twin",
    "operators": "operators",
    "log_probs": "log_probs",
    "train": "train",
    "million": "million",
    "passkey": "passkey",
    "agreement": "agreement",
    "gpu": "gpu",
    "serving": "serving",
    "figure1": "figure1",
    "policy_addition": "policy_addition",
    "policy_objectives": "policy_objectives",
    "policy_adam": "policy_adam",
    "policy_head": "policy_head",
}


def load(name: str) -> ModuleType:
    return import_module(f"{__name__}.{CASES[name]}")


def about(name: str) -> str:
    """The case's ABOUT, read without importing torch."""
    tree = ast.parse((Path(__file__).parent / f"{CASES[name]}.py").read_text(encoding="utf-8"))
    named = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return ast.literal_eval(named["ABOUT"])
