"""What the README tells its readers to type works."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from tiny import checkpoint

from minimax_hybrid import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


LINES = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("minimax-hybrid ")]
RUN_HERE = ("generate", "inspect", "convert", "cost")


def test_it_begins_with_the_two_commands_whose_scripts_are_there():
    assert LINES[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]
    scripts = re.findall(r"\bscripts/[\w.]+", "\n".join(LINES))
    assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command):
    name, *arguments = shlex.split(command)[1:]
    args, rest = cli._parser().parse_known_args([name, *arguments])
    assert callable(args.run) and (not rest or name == "bench")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] in RUN_HERE])
def test_commands_that_need_no_hours_run(command, tmp_path, capsys):
    """DIR is a checkpoint and NEW a folder to be made."""
    places = {"DIR": checkpoint(tmp_path / "checkpoint"), "NEW": tmp_path / "new"}
    arguments = [str(places.get(word, word)) for word in shlex.split(command)[1:]]
    if "--chat" in arguments:
        arguments[arguments.index("--chat") + 1] = "hi"  # the random checkpoint knows no capitals
    if arguments[0] == "generate":
        arguments += ["--max-new-tokens", "5"]
    assert cli.main(arguments) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("block", blocks("python"))
def test_python_examples_run(block, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(block)
    runpy.run_path(str(script))


def test_extras_it_names_are_those_of_the_project():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"`\[(\w+)\]`", README)) <= set(extras)
