"""What keeps the tree readable: imports go one way, files are of a size, documents name what exists."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS, MODEL = ROOT / "kernels" / "minimax_kernels", ROOT / "minimax_hybrid"
SKIPPED = {".venv", ".git", "build", "dist", "runs", "__pycache__"}
# Every module is on one floor, and a floor may import itself and those named behind it. A module of
# minimax_hybrid that is not listed belongs to "model".
FLOORS = {
    "kernels": ("minimax_kernels",),
    "config": ("config", "compat", "formatting"),
    "layers": (
        "layers",
        "lightning_attention",
        "softmax_attention",
        "experts",
        "lm_head",
        "decoder_layer",
        "cache",
        "sequences",
    ),
    "cost": ("cost",),
    "loading": ("checkpoint.headers", "checkpoint.loading"),
    "parallel": ("parallel",),
    "model": (),
    "checkpoint": ("checkpoint",),
    "text": ("text", "chat"),
    "serving": ("serving",),
    "rl": ("rl",),
    "cli": ("cli", "__main__"),
    "benchmarks": ("benchmarks",),
}
ARROWS = {
    "kernels": "",
    "config": "kernels",
    "layers": "kernels config",
    "cost": "kernels config",
    "loading": "kernels config",
    "parallel": "kernels",  # plans and styles by name: it imports no layer
    "model": "kernels config layers loading parallel",
    "checkpoint": "kernels config cost loading model",
    "text": "kernels config model checkpoint loading",
    "serving": "kernels config layers model text",
    "rl": "kernels config model text checkpoint loading serving",
    "cli": "kernels config cost model checkpoint loading text serving parallel rl",
    "benchmarks": "kernels config layers cost model checkpoint loading text serving parallel rl cli",
}
# Where transformers hands arguments through: methods that override its own, and functions that it calls.
OVERRIDES = {
    "__call__", "__post_init__", "_get_logits_processor", "convert_rope_params_to_dict", "forward",
    "from_dict", "from_pretrained", "generate", "get_config_dict", "piecewise_attention", "piecewise_mask",
    "save_pretrained", "update",
    "tiny", "m1",  # fields of the config, which checks them
}  # fmt: skip
LONGEST = {"tests": 600, "": 460}  # lines of a file


def files(folder: Path, *endings: str) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*")
        if path.suffix in endings and not SKIPPED & set(path.relative_to(ROOT).parts)
    )  # fmt: skip


def module_name(path: Path) -> str:
    root = ROOT / "kernels" if KERNELS in path.parents else ROOT
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """Modules that a file names in its import statements, in full; `at_import` leaves out those in
    functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module_name(path).split(".")[: None if path.stem == "__init__" else -1]
    later = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef)
        for node in ast.walk(block)
    }  # fmt: skip
    for node in ast.walk(tree):
        if at_import and id(node) in later:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def floor(module: str) -> str:
    inner = module.removeprefix("minimax_hybrid.")
    return next((name for name, modules in FLOORS.items() if within(inner, *modules)), "model")


SOURCES = {
    module_name(path): path
    for folder in (KERNELS, MODEL, ROOT / "benchmarks")
    for path in files(folder, ".py")
}


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} -> {other}"
        for module, path in SOURCES.items()
        if module != "minimax_hybrid"
        for other in imported(path)
        if other in SOURCES and floor(other) not in (floor(module), *ARROWS[floor(module)].split())
    ]
    assert not wrong


def test_no_module_waits_for_another_that_waits_for_it() -> None:
    graph = {
        name: {m for m in imported(path, at_import=True) if m in SOURCES and not within(name, m)}
        for name, path in SOURCES.items()
        if path.stem != "__init__"
    }
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert len(order) >= len(graph) > 30


def test_tensors_need_no_transformers_and_rl_no_trainer_but_its_plugins() -> None:
    banned = {
        "kernels": ("transformers", "trl", "verl"),
        "model": ("trl", "verl"),
        "layers": ("trl", "verl"),
    }
    wrong = [
        f"{module} -> {other}"
        for module, path in SOURCES.items()
        for other in imported(path)
        if within(other, *banned.get(floor(module), ()))
    ]
    assert not wrong


@pytest.mark.parametrize("name", ["objective", "advantages"])
def test_objective_and_advantages_can_be_lifted_out(name):
    ours = set(imported(MODEL / "rl" / f"{name}.py")) - {"torch"}
    known = ("torch", "dataclasses", "typing", "collections", "math", "enum", "minimax_hybrid.rl.objective")
    assert all(within(module, *known) for module in ours), ours


def test_the_folder_kernels_is_no_package():
    """With an `__init__.py` it would be imported in the place of a library that transformers looks for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (KERNELS / "__init__.py").exists()


def test_no_flag_is_read_from_the_environment():
    flag = re.compile(r"\benviron\b|\bgetenv\b")
    places = (*files(KERNELS, ".py"), *files(MODEL, ".py"), *files(ROOT / "benchmarks", ".py"))
    assert not [str(path) for path in places if flag.search(path.read_text(encoding="utf-8"))]


def test_functions_of_ours_say_what_they_take() -> None:
    found = {
        f"{module}.{node.name}"
        for module, path in SOURCES.items()
        if floor(module) != "benchmarks"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.args.kwarg and node.name not in OVERRIDES
    }
    assert not found


def test_every_file_can_be_read_in_one_sitting():
    long = {
        str(path.relative_to(ROOT)): count
        for path in files(ROOT, ".py", ".sh")
        if (count := len(path.read_text(encoding="utf-8").splitlines()))
        > LONGEST["tests" if ROOT / "tests" in path.parents else ""]
    }
    assert not long


def test_the_project_speaks_of_itself_alone():
    foreign = re.compile(
        r"/work\b|\bthis session\b|\bissue #?\d|\bTODO\b|\bFIXME\b|\bas an AI\b|pythonhosted|\bpypi\.org"
    )
    found = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
        for path in files(ROOT, ".py", ".md", ".sh", ".toml")
        if path != Path(__file__)
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if foreign.search(line)
    ]
    assert not found


DOCUMENTS = [path for path in files(ROOT, ".md") if not any(p.startswith(".") for p in path.parts[1:])]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    top = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.name not in SKIPPED)
    named = re.findall(rf"`((?:{top})(?:/[\w.*-]+)*/?)`", text)
    missing += [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert not missing
