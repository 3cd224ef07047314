"""The ``monit`` command for release scripts and operators. It sends requests to the running agent.

Options, messages and exit codes match monit 5.2.5 (monitor.c, control.c, http/cervlet.c), because scripts depend on
them. To start quickly, this module imports little besides the standard library. Its actions import further modules when
they need them.
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
from agent_shim.edges.monit_text import VERSION, HostFacts, status, summary

FAILED: Final = 1
NOT_RUNNING: Final = "the monit daemon is not running"
USAGE: Final = """\
usage: monit [-g GROUP] [-b DIR] ACTION

  summary                                     a line for each service
  status                                      details of each service
  start|stop|restart|monitor|unmonitor NAME   a service, "all", or with -g those of a group
  reload, validate, quit                      as in monit
  procmatch PATTERN                           processes whose command line matches
  -t [FILE...]                                check the syntax of monit files
  -v                                          list the services first
  -V                                          the version

  -I                                          run as the daemon, in the foreground
  -b DIR                                      root directory instead of /var/vcap"""

FATAL: Final = frozenset({"Does not exist", "Invalid type", "Data access error", "ICMP failed"})
"""Faults for which ``validate`` returns 0, as monit 5.2.5 does."""
CHANGES: Final = ("start", "stop", "restart", "monitor", "unmonitor")


class MonitError(Exception):
    """An error. Its message is printed after the program name, and the exit code is 1."""


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line."""

    name: str
    """Name of the program, which is the prefix of its messages."""
    paths: Paths
    options: Mapping[str, str]
    words: Sequence[str]

    @property
    def group(self) -> str:
        return self.options.get("-g", "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``monit``. Return 0 on success and 1 on failure. ``status`` and ``summary`` return 0 even when no agent is
    running, and ``validate`` has its own rule (see ``_validate``).
    """
    name, code = Path(sys.argv[0]).name, 0
    try:
        given, words = _options(list(sys.argv[1:] if argv is None else argv))
        command = Command(name, Paths(Path(given.get("-b", VCAP)).absolute()), given, words)
        code = _run(command)
        sys.stdout.flush()
        return code
    except MonitError as exc:
        print(safetext.lines(f"{name}: {exc}"), file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader closed the pipe, as `grep -q` does. That is not an error. Replace stdout, because Python would
        # otherwise fail to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return code


def _options(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into options and words. Raises ``MonitError`` with monit's message."""
    try:
        options, words = getopt.gnu_getopt(argv, "b:c:d:g:l:p:s:iItvVh")
    except getopt.GetoptError as exc:
        if "requires" in exc.msg:
            raise MonitError(f"option -- {exc.opt} requires an argument") from exc
        raise MonitError(f"invalid option -- {exc.opt}  (-h will show valid options)") from exc
    return dict(options), words


def _run(command: Command) -> int:
    """Handle the options, run the action, and return the exit code. With ``-h``, ``-V`` or ``-t``, no action is run."""
    if "-h" in command.options:
        print(USAGE)
        return 0
    if "-V" in command.options:
        print(f"This is Monit version {VERSION}\nemulated by agent-shim {__version__}")
        return 0
    _require_control_file(command)
    if "-t" in command.options:
        return _check(command)
    if "-v" in command.options:
        _list(command)
    action = command.words[0] if command.words else ""
    return _act(command, action)


def _act(command: Command, action: str) -> int:
    """Run an action and return the exit code. Without an action, become the daemon if ``-I`` is given and none is
    running. Otherwise, print monit's message about waking the daemon, although the agent never has to be woken.
    """
    if action in CHANGES:
        return _change(command, action)
    match action:
        case "summary" | "status":
            return _show(command)
        # If an agent is running, there is nothing to reload, because the agent gets monit files from the Director. If
        # the daemon that replaces monit is running instead, it rereads its files.
        case "reload":
            _need(command, "reload")
            print("Reinitializing monit daemon", file=sys.stderr)
            return 0
        case "validate":
            return _validate(command)
        case "procmatch":
            return _match(command)
        case "":
            if "-I" in command.options and not _is_running(command):
                return _daemon(command)
            print(f"{command.name} daemon at {_need(command, 'show')['pid']} awakened", file=sys.stderr)
            return 0
        # Unmonitor all services, which has the same effect as quitting monit, but keep the agent running.
        case "quit":
            print(f"monit daemon with pid [{_need(command, 'quit')['pid']}] killed")
            return 0
    raise MonitError(f"invalid argument -- {action}  (-h will show valid arguments)")


def _is_running(command: Command) -> bool:
    """Return True if an agent or the daemon that replaces monit is running."""
    try:
        return bool(_ask(command, "show"))
    except NoAgentError:
        return False


def _daemon(command: Command) -> int:
    """Run as the monit daemon, as ``agent-shim monit`` does."""
    from agent_shim.core.errors import ShimError
    from agent_shim.daemon import monit_daemon

    path = Path(command.options.get("-c", _control_file(command))).absolute()
    try:
        return monit_daemon.main(monit_daemon.MonitDaemonOptions(path, command.paths))
    except (ShimError, OSError) as exc:
        raise MonitError(str(exc)) from exc


def _require_control_file(command: Command) -> None:
    """Raise ``MonitError`` if ``-c`` names a missing file. The control file's path on a stemcell is accepted even if
    the file is missing, because commands with that path are sent to the running agent.
    """
    given = command.options.get("-c", "")
    if given and Path(given) != _control_file(command) and not Path(given).exists():
        raise MonitError(f"Cannot stat the control file '{given}' -- No such file or directory")


def _control_file(command: Command) -> Path:
    return command.paths.bosh / "etc/monitrc"


def _ask(command: Command, action: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Send a request and return the answer. Raises ``MonitError`` if the agent rejects the request or does not allow
    this user to connect, and ``NoAgentError`` if no agent is running.
    """
    request = {"command": "services", "action": action, "names": list(names), "group": command.group}
    try:
        reply: dict[str, Any] = control_client.ask(command.paths.control_socket, request)
    except NoAgentError as exc:
        if isinstance(exc.__cause__, PermissionError):
            raise _not_owned(command) from exc
        raise
    if "exception" in reply:
        raise MonitError(f"action failed -- {reply['exception']['message']}")
    return reply


def _not_owned(command: Command) -> MonitError:
    """Return monit's error for a user without permission."""
    return MonitError(f"The control file '{_control_file(command)}' must be owned by you (use sudo).")


def _change(command: Command, action: str) -> int:
    """Request an action that has no output. Returns when the agent has accepted the action, not when it is complete."""
    names = command.words[1:2]
    if not names and not command.group:
        raise MonitError(f"please specify the configured service name or 'all' after {action}")
    # As in monit, -g overrides the name. ``_ask`` sends the group, which restricts "all" to its members.
    _need(command, action, ["all"] if command.group else names)
    return 0


def _need(command: Command, action: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Do the same as ``_ask``, but raise ``MonitError`` if no agent is running."""
    try:
        return _ask(command, action, names)
    except NoAgentError as exc:
        raise MonitError(NOT_RUNNING) from exc


def _validate(command: Command) -> int:
    """Print the failing services. As in monit 5.2.5, the exit code is 0 if a service is missing, has the wrong type
    or does not respond (``FATAL``), and 1 in all other cases, even if nothing fails.
    """
    wrong = [service for service in _need(command, "show")["services"] if service["state"] == "failing"]
    for service in wrong:
        print(safetext.line(f"'{service['name']}' {service['reason'] or 'process is not running'}"), file=sys.stderr)
    return 0 if any(service["phase"] != "running" or FATAL & {*service["faults"]} for service in wrong) else FAILED


def _match(command: Command) -> int:
    """Print the command lines that match a pattern."""
    if len(command.words) == 1:
        print('Invalid syntax - usage: procmatch "<pattern>"')
        return FAILED
    from agent_shim.host import proc
    from agent_shim.supervisor import posix_regex

    try:
        pattern = posix_regex.compiled(command.words[1])
    except ValueError as exc:
        print(safetext.line(f"Regex {command.words[1]} parsing error: {exc}"))
        return FAILED
    # Sort by pid, and leave out this command itself, because the pattern is one of its arguments.
    lines = [line for _, line in sorted(proc.command_lines(proc.table()).items())]
    found = [line for line in lines if "procmatch" not in line and pattern.search(line)]
    rule = "-" * 42
    print(safetext.line(f'List of processes matching pattern "{command.words[1]}":'))
    print(rule, *(f"\t{safetext.line(line)}" for line in found), rule, f"Total matches: {len(found)}", sep="\n")
    if len(found) > 1:
        print("WARNING: multiple processes matched the pattern. The agent takes the oldest, please refine the pattern")
    return 0


def _list(command: Command) -> None:
    """Print the services in the format of ``monit -v``."""
    services = safetext.value(_need(command, "show"))["services"]
    print(f"Runtime constants:\n Control file       = {_control_file(command)}")
    print(" Poll time          = 10 seconds with start delay 0 seconds\n")
    print("The service list contains the following entries:\n")
    for service in services:
        kind = "Remote Host" if service["kind"] == "host" else service["kind"].capitalize()
        rows = {f"{kind} Name": service["name"], " Group": ", ".join(service["groups"])}
        for name, value in (rows | {" Monitoring mode": service["mode"]}).items():
            print(f"{name:<21} = {value}")
        print()
    print("-" * 79)


def _check(command: Command) -> int:
    """Check the named files or, without names, the deployed jobs' files."""
    from agent_shim.supervisor.monit import parser

    named = [*command.words, *filter(None, [command.options.get("-c")])]
    try:
        # Instead of a stemcell's control file, which need not exist, check the jobs' files that it includes.
        paths = [Path(name) for name in named if Path(name) != _control_file(command)]
        paths = paths or sorted(path for path in command.paths.monit_job.iterdir() if path.suffix == ".monitrc")
    except PermissionError as exc:
        raise _not_owned(command) from exc
    except FileNotFoundError:
        paths = []
    try:
        files = [parser.parse(path.read_bytes().decode(), origin=str(path)) for path in paths]
    except (ConfigError, OSError, UnicodeDecodeError) as exc:
        raise MonitError(str(exc)) from exc
    if problems := parser.problems(files):
        raise MonitError("\n".join(map(str, problems)))
    print("Control file syntax OK", file=sys.stderr)
    return 0


def _show(command: Command) -> int:
    """Print all services for ``summary`` and ``status``, ignoring names and groups. Return 0 even without an agent."""
    try:
        shown = _ask(command, "show")
    except NoAgentError:
        print(f"{command.name}: no status available -- {NOT_RUNNING}", file=sys.stderr)
        return 0
    here = HostFacts.now()
    print(summary(shown, here) if command.words[0] == "summary" else status(shown, here))
    return 0


if __name__ == "__main__":
    sys.exit(main())
