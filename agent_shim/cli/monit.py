"""The command ``monit`` for release scripts and operators: sends requests to the running agent.

Options, texts and exit codes are those of monit 5.2.5 (monitor.c, control.c, http/cervlet.c), which scripts grep.
Quick to start: imports the standard library alone, and modules of single actions inside them.
"""

from __future__ import annotations

import getopt
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_shim import __version__
from agent_shim.core import safetext
from agent_shim.core.errors import ConfigError, NoAgentError
from agent_shim.core.paths import VCAP, Paths
from agent_shim.edges import control_client
from agent_shim.edges.monit_text import VERSION, Machine, status, summary

FAILED: Final = 1
NOT_RUNNING: Final = "the monit daemon is not running"
USAGE: Final = """\
usage: monit [-g GROUP] [-b DIR] ACTION

  summary                                     a line for each service
  status                                      details of each service
  start|stop|restart|monitor|unmonitor NAME   a service, "all", or with -g those of a group
  reload, validate, quit                      as in monit
  -t [FILE...]                                check the syntax of monit files
  -V                                          the version

  -b DIR                                      root directory instead of /var/vcap"""

CHANGES: Final = ("start", "stop", "restart", "monitor", "unmonitor")


class MonitError(Exception):
    """A message after the name of the command; the exit code is 1."""


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line."""

    name: str
    """Name of the program, the prefix of its messages."""
    paths: Paths
    options: Mapping[str, str]
    words: Sequence[str]

    @property
    def group(self) -> str:
        return self.options.get("-g", "")


def main(argv: Sequence[str] | None = None) -> int:
    """``monit``: return 0 on success, and for a status without an agent; 1 on failure."""
    name = Path(sys.argv[0]).name
    try:
        options, words = getopt.gnu_getopt(list(sys.argv[1:] if argv is None else argv), "b:c:d:g:l:p:s:iItvVh")
        given = dict(options)
        command = Command(name, Paths(Path(given.get("-b", VCAP)).absolute()), given, words)
        return _run(command)
    except (MonitError, getopt.GetoptError) as exc:
        print(safetext.lines(f"{name}: {exc}"), file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader closed the pipe, as `grep -q` does: not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _run(command: Command) -> int:
    if "-h" in command.options:
        print(USAGE)
        return 0
    if "-V" in command.options:
        print(f"This is Monit version {VERSION}\nas agent-shim {__version__} has it")
        return 0
    if "-t" in command.options:
        return _check(command)
    action = command.words[0] if command.words else ""
    if action in CHANGES:
        return _change(command, action)
    match action:
        case "summary" | "status":
            return _show(command)
        case "reload":  # the agent reads files only from the Director
            _need(command, "show")
            print("Reinitializing monit daemon", file=sys.stderr)
            return 0
        case "validate":
            return _validate(command)
        case "quit":  # unmonitors all services, the effect of an ended monit; the agent itself keeps running
            print(f"monit daemon with pid [{_need(command, 'quit')['pid']}] killed")
            return 0
    raise MonitError(f"invalid argument -- {action}  (-h will show valid arguments)")


def _ask(command: Command, action: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Send a request and return the answer; raises ``MonitError`` on a refusal, ``NoAgentError`` without an agent."""
    request = {"command": "services", "action": action, "names": list(names), "group": command.group}
    reply: dict[str, Any] = control_client.ask(command.paths.control_socket, request)
    if "exception" in reply:
        raise MonitError(f"action failed -- {reply['exception']['message']}")
    return reply


def _change(command: Command, action: str) -> int:
    """Request an action without output; returns when the agent has accepted it, not at its end."""
    names = command.words[1:2]
    if not names and not command.group:
        raise MonitError(f"please specify a service name or 'all' after {action}")
    _need(command, action, ["all"] if command.group else names)
    return 0


def _need(command: Command, action: str, names: Sequence[str] = ()) -> dict[str, Any]:
    try:
        return _ask(command, action, names)
    except NoAgentError as exc:
        raise MonitError(_why_none(exc)) from exc


def _why_none(exc: NoAgentError) -> str:
    return str(exc) if isinstance(exc.__cause__, PermissionError) else NOT_RUNNING


def _validate(command: Command) -> int:
    """Print the failing services that the agent knows; return 1 if there are any.

    monit 5.2.5 swaps the exit codes (validate.c); newer versions return these.
    """
    wrong = [service for service in _need(command, "show")["services"] if service["state"] == "failing"]
    for service in wrong:
        print(safetext.line(f"'{service['name']}' {service['reason'] or 'process is not running'}"), file=sys.stderr)
    return FAILED if wrong else 0


def _check(command: Command) -> int:
    """Check the named files, else those of the deployed jobs."""
    from agent_shim.supervisor.monit import parser

    named = [*command.words, *filter(None, [command.options.get("-c")])]
    paths = [Path(name) for name in named] or sorted(command.paths.monit_job.glob("*.monitrc"))
    try:
        files = [parser.parse(path.read_text(), origin=str(path)) for path in paths]
    except (ConfigError, OSError, UnicodeDecodeError) as exc:
        raise MonitError(str(exc)) from exc
    if problems := parser.problems(files):
        raise MonitError("\n".join(map(str, problems)))
    print("Control file syntax OK", file=sys.stderr)
    return 0


def _show(command: Command) -> int:
    """Print all services for ``summary`` and ``status``, ignoring names and groups. Returns 0 also without an agent."""
    try:
        shown = _ask(command, "show")
    except NoAgentError as exc:
        print(f"{command.name}: no status available -- {_why_none(exc)}", file=sys.stderr)
        return 0
    here = Machine.now()
    print(summary(shown, here) if command.words[0] == "summary" else status(shown, here))
    return 0


if __name__ == "__main__":
    sys.exit(main())
