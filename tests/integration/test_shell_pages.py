"""Tests completion in real shells (bash, and zsh and fish from Debian's packages), and the manual page in groff."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent_shim.cli import commands
from tests.support.instance import COMMAND, RunningAgent
from tools import shell_pages

SHELLS = {
    "bash": (["bash", "--noprofile", "--norc", "-i"], "source scripts/agent-shim.bash"),
    "zsh": (
        ["zsh", "-f", "-i"],
        "fpath=($PWD/scripts $fpath); autoload -U compinit; compinit -u -D; setopt menu_complete",
    ),
}
FISH = {
    "agent-shim handb": ["handback"],
    "agent-shim logs --si": ["--since"],
    "agent-shim probe l": ["live"],
    "agent-shim run --log-format j": ["json"],
    "agent-shim check --as sett": ["settings"],
}
END = "\x01printf '<%s>' \x05 ; echo end\r"
"""Keys that insert a command at the beginning of the typed line and press Return. The command prints the words that the
line contains after completion.
"""


@pytest.fixture
async def running(instance: RunningAgent) -> RunningAgent:
    """Run an agent with two jobs, and put an ``agent-shim`` program in a directory for the shells' PATH."""
    await instance.deploy(2)
    program = instance.scratch / "bin/agent-shim"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(shlex.split(COMMAND)[:3])} "$@"\n')
    program.chmod(0o755)
    return instance


def type_keys(shell: str, scratch: Path, keys: str) -> list[str]:
    """Type ``keys`` in a shell that has loaded our completion script. Return the words that are then on the line."""
    argv, begin = SHELLS[shell]
    write_script(shell, scratch)
    assert shutil.which(argv[0]), f"{shell} is missing: ./dev ci installs it"
    environment = os.environ | {"PATH": f"{scratch}/bin:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(scratch)}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=scratch, env=environment, start_new_session=True
    ) as child:
        os.close(theirs)
        seen = ""
        try:
            os.write(ours, f"PS1=; {begin}; echo rea''dy\n".encode())
            seen = _until(ours, "ready")
            os.write(ours, f"{keys}{END}".encode())
            seen = _until(ours, ">end")
        finally:
            child.kill()
            os.close(ours)
    return seen[seen.rindex("<agent-shim>") :].partition(">end")[0].strip("<").split("><")


def write_script(shell: str, scratch: Path) -> None:
    script = scratch / "scripts" / commands.SHELLS[shell]
    script.parent.mkdir(exist_ok=True)
    script.write_text(shell_pages.completion(shell))


def _until(terminal: int, wanted: str, seconds: float = 60) -> str:
    os.set_blocking(terminal, False)
    seen, end = "", time.monotonic() + seconds
    while wanted not in seen:
        assert time.monotonic() < end, f"{wanted} does not appear: {seen!r}"
        with contextlib.suppress(BlockingIOError):
            seen += os.read(terminal, 65536).decode()
        time.sleep(0.02)
    return seen


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("agent-shim handb\t", ["handback"]),
        ("agent-shim logs --si\t", ["logs", "--since"]),
        ("agent-shim probe l\t", ["probe", "live"]),
        ("agent-shim run --log-format j\t", ["run", "--log-format", "json"]),
        ("agent-shim check agent.j\t", ["check", "agent.json"]),
        ("agent-shim check --as sett\t", ["check", "--as", "settings"]),
    ],
)
def test_bash_and_zsh_complete_commands_and_options(
    shell: str, keys: str, words: Sequence[str], tmp_path: Path
) -> None:
    (tmp_path / "agent.json").touch()

    assert type_keys(shell, tmp_path, keys) == ["agent-shim", *words]


@pytest.mark.parametrize(("shell", "key"), [("bash", "\x1b*"), pytest.param("zsh", "\t", marks=pytest.mark.slow)])
async def test_bash_and_zsh_complete_service_names(shell: str, key: str, running: RunningAgent) -> None:
    """``stop`` completes services and ``logs`` completes jobs. The names come from the agent that ``-b`` selects."""
    names = sorted(running.pids())
    for command in ("stop", "logs"):
        line = f"agent-shim {command} -b {running.base} {names[0][:2]}{key}"
        found = await asyncio.to_thread(type_keys, shell, running.scratch, line)

        # The completion key inserts all matching words in bash, and only the first one in zsh.
        assert found[4:] == (names if shell == "bash" else names[:1])


def fish(line: str, where: Path) -> list[str]:
    """Return the words that fish offers as completions for a line."""
    assert shutil.which("fish"), "fish is missing: ./dev ci installs it"
    write_script("fish", where)
    source = f"source scripts/agent-shim.fish; complete -C {shlex.quote(line)}"
    environment = os.environ | {"HOME": str(where), "PATH": f"{where}/bin:{os.environ['PATH']}"}
    argv = ["fish", "--no-config", "-c", source]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=where, check=True)
    return [offer.partition("\t")[0] for offer in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("line", FISH)
def test_fish_completes_commands_and_options(line: str, tmp_path: Path) -> None:
    assert fish(line, tmp_path) == FISH[line]


@pytest.mark.slow
async def test_fish_completes_service_names(running: RunningAgent) -> None:
    for command in ("stop", "logs"):
        offered = await asyncio.to_thread(fish, f"agent-shim {command} -b {running.base} job", running.scratch)

        assert [name for name in offered if name != "all"] == sorted(f"job{number}" for number in range(2))


@pytest.mark.slow
def test_manual_page_formats_without_warnings() -> None:
    argv = ["groff", "-man", "-Tascii", "-P-cbou", "-ww"]
    done = subprocess.run(argv, input=shell_pages.manual(), capture_output=True, text=True, check=True)

    assert done.stderr == ""
    assert [line.strip() for line in done.stdout.splitlines() if line.strip() in shell_pages.parsers()] == list(
        shell_pages.parsers()
    )
