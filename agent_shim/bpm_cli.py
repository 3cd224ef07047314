"""The command ``bpm``: what release scripts and operators call, answered by the running agent.

Verbs, flags, output and exit codes are those of bpm-release (``src/bpm/commands``, ``docs/public_interface.md``). Quick
to start: what only some verbs need is imported there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from agent_shim import __version__, asking
from agent_shim.errors import NoAgentError
from agent_shim.paths import Paths

FAILED: Final = 1
PATIENCE: Final = 3600.0
"""Seconds for the agent's answer; a start waits for its hook, a stop for its process."""
PERIOD: Final = 0.1
"""Seconds between looks at what ``bpm run`` has written."""


class BpmError(Exception):
    """What bpm tells after ``Error:``."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise BpmError("must specify a job" if "JOB" in message else message)


def main(argv: Sequence[str] | None = None) -> int:
    """``bpm``: 0 done, 1 not done; ``run`` ends with the exit code of the process."""
    paths = Paths(Path(os.environ.get("BPM_BOSH_ROOT") or "/var/vcap"))
    try:
        args = _parser().parse_args(argv)
        command: Callable[[Paths, argparse.Namespace], int] = args.run
        if args.needs_root and not _may_ask(paths):
            raise BpmError("bpm must be run as root. Please run with sudo or become the root user.")
        return command(paths, args)
    except (BpmError, NoAgentError, OSError) as exc:
        print(f"Error: {exc}", file=sys.stderr)
        return FAILED


def _may_ask(paths: Paths) -> bool:
    """Root may, and who the agent runs as where that is not root."""
    try:
        return os.geteuid() == 0 or os.geteuid() == paths.control_socket.stat().st_uid
    except OSError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="bpm", description="A bosh process manager for starting and stopping release jobs")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    def verb(
        name: str, run: Callable[[Paths, argparse.Namespace], int], about: str, *, of_job: bool = True
    ) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=about)
        added.set_defaults(run=run, verb=name, needs_root=of_job or name == "list")
        if of_job:
            added.add_argument("job", metavar="JOB")
            added.add_argument("-p", "--process", default="", help="the process, if it is not named as the job")
        return added

    verb("start", _start, "start a process")
    verb("stop", _stop, "stop a process")
    run = verb("run", _run, "run a process to its end")
    run.add_argument("-v", "--volume", action="append", default=[], metavar="PATH[:OPTIONS]")
    run.add_argument("-e", "--env", action="append", default=[], metavar="KEY=VALUE")
    verb("pid", _pid, "print the process number")
    verb("list", _list, "show all processes", of_job=False)
    logs = verb("logs", _logs, "show the logs of a process")
    logs.add_argument("-a", "--all", action="store_true", help="of both stdout and stderr")
    logs.add_argument("-e", "--err", action="store_true", help="of stderr")
    logs.add_argument("-f", "--follow", action="store_true")
    logs.add_argument("-n", "--lines", type=int, default=25)
    logs.add_argument("-q", "--quiet", action="store_true", help="without names of files")
    verb("shell", _shell, "a shell that sees what the process sees")
    verb("trace", _trace, "show the system calls of a process")
    verb("version", _version, "print the version", of_job=False)
    return parser


def _ask(paths: Paths, args: argparse.Namespace, verb: str = "", **more: Any) -> Any:
    request = {"command": "bpm", "verb": verb or args.verb, "job": args.job, "process": args.process or args.job}
    reply = asking.ask(paths.control_socket, request | more, timeout=PATIENCE)
    if "value" not in reply:
        raise BpmError(reply.get("error") or reply["exception"]["message"])
    return reply["value"]


def _start(paths: Paths, args: argparse.Namespace) -> int:
    _ask(paths, args)
    return 0


def _stop(paths: Paths, args: argparse.Namespace) -> int:
    _ask(paths, args)
    return 0


def _pid(paths: Paths, args: argparse.Namespace) -> int:
    print(_running(paths, args))
    return 0


def _running(paths: Paths, args: argparse.Namespace) -> int:
    found: int = _ask(paths, args, "pid")
    if not found:
        raise BpmError("job is not running")
    return found


def _list(paths: Paths, _: argparse.Namespace) -> int:
    reply = asking.ask(paths.control_socket, {"command": "bpm", "verb": "list"})
    if "value" not in reply:
        raise BpmError(reply["exception"]["message"])
    for complaint in reply["complaints"]:
        print(complaint, file=sys.stderr)
    rows = [("Name", "Pid", "Status"), *((name, str(pid or "-"), status) for name, pid, status in reply["value"])]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, pid, status in rows:
        print(f"{name:<{widths[0]}} {pid:<{widths[1]}} {status}")
    return 0


def _version(_: Paths, __: argparse.Namespace) -> int:
    print(__version__)
    return 0


def _logs(paths: Paths, args: argparse.Namespace) -> int:
    streams = ["stdout"] * (args.all or not args.err) + ["stderr"] * (args.all or args.err)
    wanted = [_log(paths, args, stream) for stream in streams]
    if not all(path.exists() for path in wanted):
        raise BpmError("logs not found")
    flags = ["-f"] * args.follow + ["-q"] * args.quiet
    _become("tail", [*flags, "-n", str(args.lines), *map(str, wanted)])


def _log(paths: Paths, args: argparse.Namespace, stream: str) -> Path:
    name = args.process or args.job
    path: Path = paths.sys / "log" / args.job / f"{name}.{stream}.log"
    return path


def _trace(paths: Paths, args: argparse.Namespace) -> int:
    """Of all that it has started, too: bpm shows its init. Who has seen enough interrupts it: that is a good end."""
    from agent_shim.host import command, proc

    pid = _running(paths, args)
    tree = [pid, *(proc.descent(proc.children(proc.table()), [pid]) - {pid})]
    argv = ["strace", "-s", "100", "-f", "-y", "-yy", *(word for each in tree for word in ("-p", str(each)))]
    try:
        code = command.in_terminal(argv)
    except OSError as exc:
        raise BpmError(f"cannot run strace: {exc.strerror}") from exc
    return 0 if code == -signal.SIGINT else FAILED if code else 0


def _become(program: str, arguments: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    try:
        os.execvp(program, [program, *arguments])
    except OSError as exc:
        raise BpmError(f"cannot run {program}: {exc.strerror}") from exc


def _shell(paths: Paths, args: argparse.Namespace) -> int:
    from agent_shim.host import jail, jailer

    _running(paths, args)
    order: jail.Order = _ask(paths, args, "order")
    order["argv"] = ["/bin/bash"]
    order["env"]["TERM"] = os.environ.get("TERM", "")
    descriptor = jailer.write_order(order)
    os.set_inheritable(descriptor, True)
    program, *arguments = jailer.command(descriptor)
    _become(program, arguments)


def _run(paths: Paths, args: argparse.Namespace) -> int:
    """Print what the process writes into its logs until it ends; a signal ends it."""
    logs = [(_log(paths, args, "stdout"), sys.stdout.buffer), (_log(paths, args, "stderr"), sys.stderr.buffer)]
    places = {path: path.stat().st_size if path.exists() else 0 for path, _ in logs}
    ended: list[int | Exception] = []

    def wait() -> None:
        try:
            ended.append(_ask(paths, args, volumes=args.volume, env=args.env))
        except (BpmError, NoAgentError) as exc:
            ended.append(exc)

    def end(*_: object) -> None:
        threading.Thread(target=_ask, args=(paths, args, "end run"), daemon=True).start()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    while waiting.is_alive():
        time.sleep(PERIOD)
        for path, terminal in logs:
            places[path] = _copy(path, places[path], terminal)
    for path, terminal in logs:
        _copy(path, places[path], terminal)
    if isinstance(ended[0], Exception):
        raise ended[0]
    return ended[0]


def _copy(path: Path, place: int, terminal: BinaryIO) -> int:
    """Print what a file holds from ``place`` on; where it ends."""
    try:
        with path.open("rb") as file:
            file.seek(place)
            while chunk := file.read(65536):
                terminal.write(chunk)
            terminal.flush()
            return file.tell()
    except FileNotFoundError:
        return place


if __name__ == "__main__":
    sys.exit(main())
