"""The ``bpm`` command for release scripts and operators. It sends requests to the running agent.

Verbs, flags, messages and exit codes follow bpm-release (``src/bpm/commands``, ``docs/public_interface.md``), which
parses its command line with cobra. Because drain scripts call ``bpm`` in loops, it has to start quickly, so each verb
imports only the modules that it needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_shim import __version__
from agent_shim.core import safetext
from agent_shim.core.errors import NoAgentError

if TYPE_CHECKING:
    from agent_shim.cli.bpm_logs import Log

FAILED = 1
ANSWER_TIMEOUT_S = 3600.0
"""Timeout for the agent's answer. It is long because a start waits for the pre-start hook, and a stop waits for the
process to exit.
"""
SOCKET = "bosh/agent_shim.sock"
"""Path of the control socket, relative to the base directory."""

TRUE = ("1", "t", "T", "true", "TRUE", "True")
FALSE = ("0", "f", "F", "false", "FALSE", "False")
"""Values that turn a switch off, as read by Go's ``strconv.ParseBool``."""

NOT_ROOT = "bpm must be run as root. Please run 'sudo -i' to become the root user."
NOT_RUNNING = "process is not running or could not be found"


class BpmError(Exception):
    """An error with an exit code. The message is printed after ``Error:``."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class UsageError(BpmError):
    """An invalid command line. The usage text is printed before the error."""


class Flag(NamedTuple):
    """A flag, ``--name`` or ``-short``. ``kind`` is "" for a switch, otherwise the type of the value, which the usage
    text shows.
    """

    name: str
    short: str
    kind: str
    about: str

    @property
    def spellings(self) -> list[str]:
        return [*([f"-{self.short}"] if self.short else []), f"--{self.name}"]


class Verb(NamedTuple):
    """A verb of the ``bpm`` command. ``of_job`` is True if the verb needs the name of a job. ``flags`` does not include
    ``--help``.
    """

    run: Callable[[CommandLine], int]
    about: str
    flags: Sequence[Flag] = ()
    of_job: bool = True


class CommandLine(NamedTuple):
    """A parsed command line: the base directory, the verb, the words after it, and the values of flags. ``name`` is the
    verb, or "" if there is none or it is unknown. An unknown verb is the first of the ``words``.
    """

    base: str
    name: str
    words: Sequence[str]
    flags: argparse.Namespace

    @property
    def job(self) -> str:
        return self.words[0]

    @property
    def process(self) -> str:
        return getattr(self.flags, "process", "") or self.job


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bpm``. Return 0 on success and 1 otherwise. ``bpm run`` returns the exit code of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    base = os.environ.get("BPM_BOSH_ROOT") or "/var/vcap"
    try:
        code = _main(base, arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        import signal

        # The reader closed the pipe, as `head` does. Let SIGPIPE kill this process, as it kills the Go program.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
        raise
    except UsageError as exc:
        print(_usage(next((word for word in arguments if word in VERBS), "")), file=sys.stderr)
        print(safetext.lines(f"Error: {exc}"), file=sys.stderr)
        return exc.code
    except (BpmError, NoAgentError, OSError) as exc:
        # An OSError without a file name comes from this program's own code and not from a system call, so its strerror
        # is the whole message.
        why = exc.strerror if isinstance(exc, OSError) and exc.filename is None and exc.strerror else exc
        print(safetext.lines(f"Error: {why}"), file=sys.stderr)
        return exc.code if isinstance(exc, BpmError) else FAILED


def _main(base: str, arguments: list[str]) -> int:
    """Run the verb in ``arguments`` and return the exit code. Raises the errors that ``main`` reports."""
    if arguments[:1] == ["help"]:
        return _help(arguments[1] if len(arguments) > 1 else "")
    call, verb = _read(base, arguments)
    if call.flags.help:
        return _help(call.name)
    if call.flags.version:
        print(__version__)
        return 0
    if verb is None:  # "Exit code 1" is what the real bpm prints if it is called without a verb
        raise BpmError(f'unknown command "{call.words[0]}" for "bpm"') if call.words else UsageError("Exit code 1")
    if (verb.of_job or call.name == "list") and not _may_ask(base):
        raise BpmError(NOT_ROOT)
    if verb.of_job and not call.words:
        raise UsageError("must specify a job")
    return verb.run(call)


def _may_ask(base: str) -> bool:
    """Return True for root and for the agent's own user, who owns the control socket."""
    try:
        return os.geteuid() == 0 or os.geteuid() == os.stat(f"{base}/{SOCKET}").st_uid  # noqa: PTH116 - importing pathlib is slow
    except OSError:
        return False


# --- the command line -------------------------------------------------------------------------------------------------


def _read(base: str, arguments: list[str]) -> tuple[CommandLine, Verb | None]:
    """Parse flags and words in any order. Raises ``UsageError`` with the same message as cobra's flag parser, pflag."""
    name = next((word for word in arguments if not word.startswith("-")), "")
    verb = VERBS.get(name)
    rest = list(arguments)
    if verb:
        rest.remove(name)
    known = (*(verb.flags if verb else ()), HELP, VERSION)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in known:
        kinds: dict[str, Any] = {
            "": {"action": "store_true"},
            "int": {"type": _number},
            "stringArray": {"action": "append", "default": []},
            "string": {"default": ""},
        }
        parser.add_argument(*flag.spellings, **kinds[flag.kind])
    parser.add_argument("words", nargs="*")
    try:
        flags, unknown = parser.parse_known_intermixed_args(_joined(known, rest))
    except argparse.ArgumentError as exc:
        last = rest[-1]  # only the last word can be a flag without its argument
        if exc.message == "expected one argument":
            raise UsageError(
                f"flag needs an argument: {last if last[:2] == '--' else f'{last[-1]!r} in {last}'}"
            ) from exc
        flag_names = str(exc.argument_name).replace("/", ", ")
        raise UsageError(f'invalid argument "{exc.message}" for "{flag_names}" flag') from exc
    for word in unknown:
        if word.startswith("--"):
            raise UsageError(f"unknown flag: {word.partition('=')[0]}")
        raise UsageError(f"unknown shorthand flag: {word[1]!r} in {word}")
    return CommandLine(base, name if verb else "", flags.words, flags), verb


def _joined(known: Sequence[Flag], words: Sequence[str]) -> list[str]:
    """Rewrite the flags so that argparse parses them as cobra does: a value may begin with a dash, and a switch may
    have ``=true`` or ``=false``.

    If a switch is repeated, its last value is used. Anything else, such as an unknown flag or a flag without its value,
    is left to argparse, which reports it. Raises ``UsageError`` for an invalid value of a switch.
    """
    flags = {spelling: flag for flag in known for spelling in flag.spellings}
    joined: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*joined, word, *rest]
        name, equals, value = word.partition("=")
        flag = flags.get(name)
        if flag is not None and flag.kind and not equals and (given := next(rest, None)) is not None:
            joined.append(f"--{flag.name}={given}")
        elif flag is None or flag.kind or not equals or value in TRUE:
            joined.append(word if flag is None or flag.kind else name)
        elif value in FALSE:
            joined = [earlier for earlier in joined if earlier not in flag.spellings]
        else:
            raise UsageError(f'invalid argument "{value}" for "{", ".join(flag.spellings)}" flag')
    return joined


def _number(text: str) -> int:
    """Parse a number. The error contains only ``text``, because ``_read`` adds the rest of the message."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(text) from None


def _help(name: str) -> int:
    """Print the help for a verb, or for ``bpm`` itself if there is no verb ``name``. Return the exit code 0."""
    verb = VERBS.get(name)
    print(f"{verb.about if verb else ABOUT}\n\n{_usage(name if verb else '')}")
    return 0


def _usage(name: str) -> str:
    """Return the usage text for a verb, or for all verbs if ``name`` is "", in cobra's format."""
    if not name:
        width = max(map(len, VERBS)) + 1
        verbs = "\n".join(f"  {word:<{width}} {verb.about}" for word, verb in sorted(VERBS.items()))
        more = 'Use "bpm [command] --help" for more information about a command.'
        flags = _flags([HELP, VERSION])
        return f"Usage:\n  bpm [flags]\n  bpm [command]\n\nAvailable Commands:\n{verbs}\n\nFlags:\n{flags}\n\n{more}\n"
    verb = VERBS[name]
    words = " <job-name>" if verb.of_job else ""
    return f"Usage:\n  bpm {name}{words} [flags]\n\nFlags:\n{_flags([*verb.flags, HELP])}\n"


def _flags(flags: Sequence[Flag]) -> str:
    """Return the usage lines for flags."""
    names = [
        f"{', '.join(flag.spellings) if flag.short else f'    --{flag.name}'} {flag.kind}".rstrip() for flag in flags
    ]
    width = max(map(len, names))
    return "\n".join(f"  {name:<{width}}   {flag.about}" for name, flag in zip(names, flags, strict=True))


# --- verbs ------------------------------------------------------------------------------------------------------------


def _ask(call: CommandLine, verb: str = "", **more: Any) -> Any:
    """Send ``verb`` (by default the one on the command line) and the fields ``more`` to the agent, and return the value
    in its reply. Raises ``BpmError`` and ``NoAgentError``.
    """
    from agent_shim.edges import control_client

    request = {"command": "bpm", "verb": verb or call.name, "job": call.job, "process": call.process}
    reply = control_client.ask(f"{call.base}/{SOCKET}", request | more, timeout=ANSWER_TIMEOUT_S)
    if "value" not in reply:  # ``bpm_api`` reports an "error", but an agent that is not ready reports an "exception"
        raise BpmError(reply.get("error") or reply["exception"]["message"])
    return reply["value"]


def _change(call: CommandLine) -> int:
    """Run a verb that prints nothing, such as ``start``."""
    _ask(call)
    return 0


def _pid(call: CommandLine) -> int:
    print(_running_pid(call))
    return 0


def _running_pid(call: CommandLine) -> int:
    """Return the pid of the process. Raises ``BpmError`` if it is not running."""
    pid: int = _ask(call, "pid")
    if not pid:
        raise BpmError(NOT_RUNNING)
    return pid


def _list(call: CommandLine) -> int:
    """Print a table of all processes. Errors in bpm.yml files are printed to standard error."""
    from agent_shim.edges import control_client

    reply = control_client.ask(f"{call.base}/{SOCKET}", {"command": "bpm", "verb": "list"})
    if "value" not in reply:
        raise BpmError(reply["exception"]["message"])
    for complaint in reply["complaints"]:
        print(safetext.lines(complaint), file=sys.stderr)
    rows = [("Name", "Pid", "Status"), *((name, str(pid or "-"), status) for name, pid, status in reply["value"])]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, pid, status in rows:
        print(safetext.line(f"{name:<{widths[0]}} {pid:<{widths[1]}} {status}"))
    return 0


def _version(call: CommandLine) -> int:
    if call.words:  # `bpm version` takes no arguments
        print(_usage("version"), file=sys.stderr)
        return FAILED
    print(__version__)
    return 0


def _logs(call: CommandLine) -> int:
    """Print the last lines of the process's logs, by default only of stdout. All requested files must exist."""
    from agent_shim.cli import bpm_logs

    flags = call.flags
    streams = ["stdout", "stderr"] if flags.all else ["stderr"] if flags.err else ["stdout"]
    logs = [_log(call, stream) for stream in streams]
    opened = [log.open() for log in logs]
    if not all(opened):
        raise BpmError("logs not found")
    # The default and the treatment of negative numbers match the real bpm, which runs tail.
    lines = 25 if flags.lines is None else abs(flags.lines)
    bpm_logs.show(logs, lines, is_named=len(logs) > 1 and not flags.quiet, follows=flags.follow)
    return 0


def _log(call: CommandLine, stream: str) -> Log:
    """Return the log file of the process for ``stream`` (stdout or stderr)."""
    from agent_shim.cli.bpm_logs import Log

    # Names such as ``..`` must not lead out of the log directory.
    if any("/" in word or word.startswith(".") for word in (call.job, call.process)):
        raise BpmError("logs not found")
    root = f"{call.base}/sys/log"
    return Log(f"{root}/{call.job}/{call.process}.{stream}.log", root)


def _trace(call: CommandLine) -> int:
    """Trace the process and its descendants with strace (the real bpm traces the container's init). Ctrl-C ends the
    trace with exit code 0.
    """
    tree = _ask(call, "tree")
    if not tree:
        raise BpmError(NOT_RUNNING)
    from agent_shim.host import pseudo_terminal

    argv = ["strace", "-s", "100", "-f", "-y", "-yy", *(word for pid in tree for word in ("-p", str(pid)))]
    try:
        code = pseudo_terminal.in_terminal(argv)
    except OSError as exc:
        raise BpmError(f"cannot run strace: {exc.strerror}") from exc
    return 0 if code in (0, pseudo_terminal.INTERRUPTED) else FAILED


def _shell(call: CommandLine) -> int:
    """Run a shell in the environment and the mount namespace of the process, on a new terminal. Return the shell's exit
    code.

    The agent's reply contains the launcher's command line, and the order that the launcher reads from a file
    descriptor. The order says what to run, and where.
    """
    import json

    from agent_shim.host import pseudo_terminal

    pid = _running_pid(call)
    reply = _ask(call)

    order = reply["order"]
    order["argv"] = ["/bin/bash"]
    order["env"]["TERM"] = os.environ.get("TERM", "")

    def argv(terminal: int | None) -> tuple[list[str], int]:
        """Return the command, and a descriptor that it inherits."""
        order["terminal"] = terminal
        descriptor = os.memfd_create("order")  # not a file on disk, because the environment may contain secrets
        os.write(descriptor, json.dumps(order).encode() + b"\n")
        os.lseek(descriptor, 0, os.SEEK_SET)
        return [*reply["launcher"], str(descriptor)], descriptor

    return pseudo_terminal.run(argv, pid)


def _run(call: CommandLine) -> int:
    """Run the process, and print its logs until it exits. A signal to this command terminates the process.

    The request blocks until the process exits, so a thread sends it, while this thread prints the logs.
    """
    import contextlib
    import signal
    import threading

    from agent_shim.cli import bpm_logs

    outputs = (("stdout", sys.stdout.buffer), ("stderr", sys.stderr.buffer))
    logs = [(_log(call, name), stream) for name, stream in outputs]
    for log, _ in logs:
        log.open()  # starts at the end of the file, so that only new output is printed
    ended: list[int | Exception] = []
    """The exit code of the process, or the error of the request, as soon as one is known."""

    def wait() -> None:
        try:
            ended.append(_ask(call, volumes=call.flags.volume, env=call.flags.env))
        except (BpmError, NoAgentError) as exc:
            ended.append(exc)

    def ask_to_end() -> None:
        with contextlib.suppress(BpmError, NoAgentError):  # the request to run the process reports the error
            _ask(call, "end run")

    def end(*_: object) -> None:  # in a thread, so that the loop below continues to print the logs
        threading.Thread(target=ask_to_end, daemon=True).start()  # noqa: TID251 - no event loop

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    waiting = threading.Thread(target=wait, daemon=True)  # noqa: TID251 - no event loop
    waiting.start()
    is_over = False
    while not is_over:
        waiting.join(bpm_logs.POLL_S)
        is_over = bool(ended)  # checked before copying, so that the last copy includes the final output
        for log, stream in logs:
            bpm_logs.copy(log, stream)
    if isinstance(ended[0], Exception):
        raise ended[0]
    if ended[0]:  # as in the real bpm, the message contains the status twice
        raise BpmError(f"failed to run job-process: exit status {ended[0]} (exit status {ended[0]})", ended[0])
    return 0


ABOUT = "A bosh process manager for starting and stopping release jobs"
HELP = Flag("help", "h", "", "show this help")
VERSION = Flag("version", "", "", "print the version")
_PROCESS = Flag("process", "p", "string", "name of the process (default: the name of the job)")
_RUN = (
    Flag("env", "e", "stringArray", "additional environment variable: KEY=VALUE"),
    _PROCESS,
    Flag("volume", "v", "stringArray", "additional volume: PATH[:OPTIONS]"),
)
_LOGS = (
    Flag("all", "a", "", "show both stdout and stderr"),
    Flag("err", "e", "", "show stderr instead of stdout"),
    Flag("follow", "f", "", "keep printing new lines"),
    Flag("lines", "n", "int", "number of lines to show from the end of each file (default: 25)"),
    _PROCESS,
    Flag("quiet", "q", "", "omit the headers with the file names"),
)
VERBS = {
    "start": Verb(_change, "start a process", [_PROCESS]),
    "stop": Verb(_change, "stop a process", [_PROCESS]),
    "run": Verb(_run, "run a process and wait until it ends", _RUN),
    "pid": Verb(_pid, "print the process id", [_PROCESS]),
    "list": Verb(_list, "show all processes", of_job=False),
    "logs": Verb(_logs, "show the logs of a process", _LOGS),
    "shell": Verb(_shell, "start a shell in the environment of a process", [_PROCESS]),
    "trace": Verb(_trace, "trace the system calls of a process", [_PROCESS]),
    "version": Verb(_version, "print the version", of_job=False),
}

if __name__ == "__main__":
    sys.exit(main())
