"""Small programs that tests run as real processes, and helpers to find and kill them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from agent_shim.core.paths import Paths
from agent_shim.host import proc, process
from tests.support.programs import end_left

HERE = Path(__file__).parent


def argv(name: str, *arguments: object) -> list[str]:
    """Return the command line for one of the programs in this directory."""
    interpreter = [sys.executable, "-S", "-E"] if name.endswith(".py") else ["/bin/sh"]
    return [*interpreter, str(HERE / name), *map(str, arguments)]


def foreign(*command: object, **env: str) -> int:
    """Start a program that is not a descendant of this process, with ``env`` as its whole environment.

    Return its pid.
    """
    script = '"$@" >/dev/null 2>&1 & echo $!'
    arguments = ["/bin/sh", "-c", script, "sh", *map(str, command)]
    return int(subprocess.run(arguments, env=env, capture_output=True, check=True).stdout)


def number_in(path: Path) -> int | None:
    """Return the number that a program wrote to a file, or None if the file does not contain a complete number yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:  # Another process may remove the file at any moment.
        return None
    return int(text) if text.endswith("\n") else None


def number_of_program(path: Path, name: str) -> int | None:
    """Return the pid in a file, or None if the process with that pid is not running the program ``name`` yet.

    A shell script writes its pid before it execs the program, so the pid alone does not show that the program is
    running.
    """
    number = number_in(path)
    return number if number is not None and proc.name(number) == name else None


def is_alive(pid: int) -> bool:
    """Return True if a process is running. A zombie does not count as running."""
    found = proc.stat(pid)
    return found is not None and found.is_alive


def kill(pid: int) -> None:
    """Kill a process, which must exist."""
    found = proc.stat(pid)
    assert found is not None
    assert process.send(found.identity, signal.SIGKILL)


def variable(pid: int, name: str) -> str:
    """Return a variable from a process's initial environment, or "" if the variable is not set."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    return dict(each.partition("=")[::2] for each in environ.split("\0")).get(name, "")


def marked(name: str, value: str) -> list[proc.Stat]:
    """Return the running processes in whose environment the variable ``name`` contains ``value``."""
    return [s for s in proc.table().values() if s.is_alive and value in variable(s.pid, name)]


def end_marked(name: str, value: str) -> None:
    """Kill the marked processes that a test has left behind, including any that they fork during the search."""
    while left := marked(name, value):
        for stat in left:
            process.send(stat.identity, signal.SIGKILL)


def end_kept(paths: Paths) -> None:
    """Kill all descendants of an agent's keepers."""
    if paths.keepers.is_dir():
        end_left.end_kept(str(paths.keepers))
