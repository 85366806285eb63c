"""The two scripts say in words what keeps them from working, and leave nothing half made.

They run in a copy of the repository's root without its packages; programs that stand in for Python fail as
real ones do.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="the scripts are for bash")


@pytest.fixture
def clone(tmp_path):
    """A clone in a folder with a blank in its name."""
    root = tmp_path / "my clone"
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / ".ci", root / ".ci")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def real_python_but(path: Path, module: str, text: str) -> Path:
    """This Python, except that `-m module` runs `text`."""
    return program(path, f'if [ "$1 $2" = "-m {module}" ]; then\n{text}\nfi\nexec "{sys.executable}" "$@"')


def run(script: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | variables
    done = subprocess.run(
        ["bash", str(script), *arguments], cwd="/", env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/test.sh", ".ci/run"])
def test_a_python_that_is_absent_or_too_old_is_named(clone, script, tmp_path):
    code, said = run(clone / script, PYTHON="no-such-python")
    assert code == 1 and "PYTHON is no-such-python, and there is no such program" in said
    old = program(tmp_path / "old", 'case "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac')
    code, said = run(clone / script, PYTHON=str(old))
    assert code == 1 and "version 3.9; Python 3.11 or newer is needed" in said
    assert not (clone / ".venv").exists()


def test_no_python_at_all_is_told(clone, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "basename", "awk", "df", "cat", "rm", "cksum", "tr"):
        (tools / name).symlink_to(shutil.which(name))
    code, said = run(clone / "scripts/quickstart.sh", PATH=str(tools))
    assert code == 1 and "no Python of version 3.11 or newer was found" in said


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("The virtual environment was not created because ensurepip is not available.", "python3-venv"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("PermissionError: [Errno 13] Permission denied: '.venv'", "may not write"),
        ("Error: something new", "see the lines above"),
    ],
)
def test_an_environment_that_cannot_be_made_leaves_nothing(clone, tmp_path, printed, words):
    failing = f'mkdir -p .venv/bin\necho "{printed}"\nexit 1'
    python = real_python_but(tmp_path / "python", "venv", failing)
    code, said = run(clone / "scripts/test.sh", PYTHON=str(python))
    assert code == 1 and "test.sh: making " in said and words in said and printed in said
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("kind", ["empty", "no python", "old python", "no pip", "a file", "a dead link"])
def test_a_broken_environment_is_named_and_kept(clone, tmp_path, kind):
    venv = clone / ".venv"
    if kind == "a file":
        venv.write_text("")
    elif kind == "a dead link":
        venv.symlink_to(tmp_path / "absent")
    else:
        (venv / "bin").mkdir(parents=True)
    if kind == "no python":
        (venv / "bin" / "python").symlink_to(tmp_path / "absent")
    elif kind == "old python":
        program(venv / "bin" / "python", "exit 1")
    elif kind == "no pip":
        real_python_but(venv / "bin" / "python", "pip", "exit 1")
    code, said = run(clone / "scripts/quickstart.sh")
    assert code == 1 and f"{venv} is broken" in said and f"rm -r {venv}" in said
    assert os.path.lexists(venv)


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("NewConnectionError('Failed to establish a connection: [Errno 101] Network is unreachable')\n"
         "ERROR: No matching distribution found for setuptools", "pip cannot reach its package index"),
        ("ERROR: Could not install packages due to an OSError: No space left on device", "the disk is full"),
        ("ERROR: Could not find a version that satisfies the requirement torch (from versions: none)",
         "cannot be reached or offers no such package"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no fitting release for Python 3."),
    ],
)  # fmt: skip
def test_what_pip_cannot_install_is_told_and_tried_again_the_next_time(clone, printed, words):
    attempts = clone / "attempts"
    failing = f'[ "$3" = --version ] && exit 0\necho once >>"{attempts}"\necho "{printed}"\nexit 1'
    real_python_but(clone / ".venv" / "bin" / "python", "pip", failing)
    for count in (1, 2):
        code, said = run(clone / "scripts/test.sh")
        assert code == 1 and "failed: " in said and words in said
        assert attempts.read_text().count("once") == count


@pytest.fixture
def installed(clone):
    """An environment whose pip succeeds and counts, and whose other modules print their arguments."""
    text = (
        f'if [ "$1 $2" = "-m pip" ]; then echo "$@" >>"{clone}/pip"; exit 0; fi\n'
        'if [ "$1" = "-m" ]; then echo "module $@"; exit ${MODULE_STATUS:-0}; fi\n'
        'case "$1" in *.py) echo "program $@"; exit ${PROGRAM_STATUS:-0} ;; esac\n'
        f'exec "{sys.executable}" "$@"'
    )
    program(clone / ".venv" / "bin" / "python", text)
    return clone


def installs(clone: Path) -> list[str]:
    """What pip was asked to install, one entry a call."""
    return [line.partition(" install ")[2] for line in (clone / "pip").read_text().splitlines()
            if " install " in line]  # fmt: skip


def test_a_second_run_installs_nothing_unless_the_project_changed(installed):
    for _ in range(2):
        code, said = run(installed / "scripts/test.sh", "-k", "one and two")
        assert code == 0 and said.splitlines()[-1] == "module -m pytest -k one and two"
        assert installs(installed) == ["-e .[dev]"]
    with (installed / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    run(installed / "scripts/test.sh")
    assert len(installs(installed)) == 2
    assert run(installed / "scripts/quickstart.sh")[0] == 0
    assert installs(installed)[2:] == ["-e ."]


def test_torch_is_installed_only_where_there_is_none(installed):
    python = installed / ".venv" / "bin" / "python"
    without_torch = 'case "$2" in *find_spec*) exit 1 ;; esac\nexec'
    python.write_text(python.read_text().replace("exec", without_torch))
    run(installed / "scripts/test.sh")
    assert installs(installed) == ["torch==2.13.0", "-e .[dev]"]


def test_tests_that_fail_make_the_scripts_fail(installed):
    for script in ("scripts/test.sh", ".ci/run"):
        assert run(installed / script, MODULE_STATUS="1")[0] == 1


def test_ci_compiles_the_kernels_and_ends_with_the_tests(installed):
    program(installed / "scripts" / "compile_kernels.py", "")
    code, said = run(installed / ".ci/run", "-x")
    assert code == 0
    assert said.splitlines()[-2:] == ["program scripts/compile_kernels.py --check", "module -m pytest -x"]
    code, said = run(installed / ".ci/run", PROGRAM_STATUS="3")
    assert code == 3 and said.splitlines()[-1] == "module -m pytest"


def test_the_scripts_may_be_called_as_programs():
    for script in ("scripts/quickstart.sh", "scripts/test.sh", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script
