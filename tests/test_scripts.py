"""The scripts say what keeps them from working, and install once.

They run in a copy of the scripts; programs that stand in for Python fail as real ones do.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("scripts/quickstart.sh", "scripts/test.sh", "scripts/check.sh", ".ci/run")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="the scripts are for bash")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """In a folder with a blank in its name; `python -m` and `python FILE` print what was asked."""
    root = tmp_path / "my clone"
    for name in ("scripts", ".ci"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    text = 'case "$1" in -m | *.py) echo "called $@"; exit ${STATUS:-0} ;; esac\n'
    program(root / ".venv/bin/python", text + f'exec "{sys.executable}" "$@"')
    return root


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def run(script: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | variables
    done = subprocess.run(
        ["bash", str(script), *arguments], cwd="/", env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_without_a_fitting_python_nothing_is_made(clone: Path, tmp_path: Path) -> None:
    shutil.rmtree(clone / ".venv")
    for python in ("no-such-python", program(tmp_path / "old", "exit 1")):
        code, said = run(clone / "scripts/quickstart.sh", PYTHON=python)
        assert code == 1 and f"no Python 3.11 or newer: {python} is absent or older" in said
    assert not (clone / ".venv").exists()


def test_an_environment_that_cannot_be_made_leaves_nothing(clone: Path, tmp_path: Path) -> None:
    shutil.rmtree(clone / ".venv")
    text = '[ "$1" = -c ] && exit 0\nmkdir -p .venv/bin\necho "ensurepip is not available"\nexit 1'
    code, said = run(clone / "scripts/test.sh", PYTHON=program(tmp_path / "python", text))
    assert code == 1 and "ensurepip is not available" in said and "python3-venv" in said
    assert not (clone / ".venv").exists()


def test_a_broken_environment_is_named_and_kept(clone: Path) -> None:
    program(clone / ".venv/bin/python", "exit 1")
    code, said = run(clone / "scripts/quickstart.sh")
    assert code == 1 and f"{clone}/.venv has no working Python" in said and (clone / ".venv/bin").exists()


def test_what_pip_cannot_install_is_tried_again_the_next_time(clone: Path) -> None:
    for _ in range(2):
        code, said = run(clone / "scripts/test.sh", STATUS="1")
        assert code == 1 and "pip could not install" in said and "network" in said and "are free" in said


def test_a_second_run_installs_nothing_unless_the_project_changed(clone: Path) -> None:
    def calls() -> list[str]:
        code, said = run(clone / "scripts/test.sh", "-k", "one and two")
        assert code == 0 and said.splitlines()[-1].endswith(" -k one and two")
        return [line for line in said.splitlines() if " install " in line]

    assert calls()[-1].endswith("install -e .[dev]")
    assert not calls()
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert calls()


def test_ci_checks_first_compiles_and_ends_with_the_tests(clone: Path) -> None:
    code, said = run(clone / ".ci/run", "-x")
    asked = [line for line in said.splitlines() if line.startswith("called ")]
    assert code == 0 and said.index("ruff check") < said.index("compile_kernels.py --check")
    assert "mypy" in said
    assert "pytest" in asked[-1] and asked[-1].endswith(" -x")
    for script in ("scripts/test.sh", ".ci/run"):
        assert run(clone / script, STATUS="3")[0] != 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_may_be_called_as_programs(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
