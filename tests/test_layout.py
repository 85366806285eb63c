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
# Built on the model and on rl: nothing else may import these.
TOP = ("cli", "__main__")
LAYERS = ("layers", "lightning_attention", "softmax_attention", "experts", "lm_head", "model")
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
    """Modules that a file names in its import statements, in full; `at_import` leaves out those in functions
    and those for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module_name(path).split(".")[: None if path.stem == "__init__" else -1]
    later = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef)
        or isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
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


def violations(paths: list[Path], *forbidden: str) -> list[str]:
    return [f"{module_name(p)} -> {m}" for p in paths for m in imported(p) if within(m, *forbidden)]


def test_kernels_know_tensors_only():
    assert not violations(files(KERNELS, ".py"), "minimax_hybrid", "transformers", "benchmarks")


def test_the_model_knows_neither_rl_nor_the_command_line():
    model = [path for path in MODEL.glob("*.py") if path.stem not in TOP]
    top = [f"minimax_hybrid.{name}" for name in TOP]
    assert not violations(model, "minimax_hybrid.rl", "benchmarks", "trl", "verl", *top)


def test_rl_sees_the_model_from_outside():
    hidden = [f"minimax_hybrid.{name}" for name in (*LAYERS, *TOP)]
    assert not violations(files(MODEL / "rl", ".py"), "benchmarks", *hidden)


@pytest.mark.parametrize("name", ["objective", "advantages"])
def test_objective_and_advantages_can_be_lifted_out(name):
    ours = set(imported(MODEL / "rl" / f"{name}.py")) - {"torch"}
    known = ("torch", "dataclasses", "typing", "collections", "math", "enum", "minimax_hybrid.rl.objective")
    assert all(within(module, *known) for module in ours), ours


def test_no_module_waits_for_another_that_waits_for_it():
    modules = {module_name(path): path for path in (*files(KERNELS, ".py"), *files(MODEL, ".py"))}
    graph = {
        name: {m for m in imported(path, at_import=True) if m in modules and not within(name, m)}
        for name, path in modules.items() if path.stem != "__init__"
    }  # fmt: skip
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert len(order) >= len(graph) > 30


def test_the_folder_kernels_is_no_package():
    """With an `__init__.py` it would be imported in the place of a library that transformers looks for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (KERNELS / "__init__.py").exists()


def test_no_flag_is_read_from_the_environment():
    flag = re.compile(r"\benviron\b|\bgetenv\b")
    places = (*files(KERNELS, ".py"), *files(MODEL, ".py"), *files(ROOT / "benchmarks", ".py"))
    assert not [str(path) for path in places if flag.search(path.read_text(encoding="utf-8"))]


def test_functions_of_ours_say_what_they_take():
    """`**kwargs` is for methods that override transformers' and for functions that it calls by name."""
    called_by_transformers = {"piecewise_attention", "piecewise_mask"}
    found = {
        node.name
        for path in (*files(KERNELS, ".py"), *files(MODEL, ".py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.args.kwarg and node.args.kwarg.arg == "kwargs"
    }
    assert found <= called_by_transformers


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
