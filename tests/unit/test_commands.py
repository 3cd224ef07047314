"""The grammar of ``agent-shim``: every command explains itself, and its examples are true."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agent_shim import commands, probe
from agent_shim.paths import Paths


def examples() -> list[str]:
    """Every line of the examples that calls us, without what the shell does with it."""
    lines = [line.strip() for text in commands.EXAMPLES.values() for line in text.splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"\||&&|#", line)]
    return [part[part.index("agent-shim") :] for part in parts if "agent-shim" in part]


@pytest.mark.parametrize("line", examples())
def test_an_example_is_a_command_line(line: str) -> None:
    _, *words = shlex.split(line)

    assert commands.parser().parse_args(words).run


def test_every_command_has_an_example_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in commands.EXAMPLES:
        with pytest.raises(SystemExit) as ended:
            commands.parser().parse_args([name, "--help"])
        assert ended.value.code == 0
        assert f"examples:\n  agent-shim {name}" in capsys.readouterr().out.replace("sv stop agent && ", "")


def test_the_overview_names_every_command_that_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.parser().parse_args(["--help"])
    listed = re.findall(r"^    (\w+)\b", capsys.readouterr().out, re.MULTILINE)

    assert sorted(listed) == sorted(commands.EXAMPLES)


def test_a_probe_asks_the_socket_the_agent_listens_on() -> None:
    assert Path("/some/base", probe.SOCKET) == Paths(Path("/some/base")).control_socket


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (["live"], ("live", "/var/vcap")),
        (["ready", "-b", "/x"], ("ready", "/x")),
        (["--help"], None),
        ([], None),
        (["live", "extra"], None),
    ],
)
def test_a_probe_knows_what_it_was_asked(words: list[str], question: tuple[str, str] | None) -> None:
    assert probe.read(words) == question


def test_a_probe_imports_little(tmp_path: Path) -> None:
    """Neither the parser of options nor dataclasses, paths, the event loop: they cost more than the question."""
    script = (
        "import sys; before = set(sys.modules); from agent_shim.cli import main; code = main(sys.argv[1:]); "
        "print(code, *sorted(set(sys.modules) - before))"
    )
    argv = [sys.executable, "-S", "-c", script, "probe", "live", "-b", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    code, *loaded = done.stdout.split()

    assert code == "69"
    assert "is it running" in done.stderr
    assert {"agent_shim", "agent_shim.cli", "agent_shim.probe"} <= set(loaded)
    assert not {"argparse", "dataclasses", "pathlib", "re", "asyncio", "msgspec", "agent_shim.commands"} & set(loaded)
