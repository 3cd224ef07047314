"""The commands behind ``agent-shim`` and ``bosh-agent``. Each command imports the modules that it needs only when it
runs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from agent_shim import __revision__, __version__
from agent_shim.core import safetext
from agent_shim.core.errors import BadArgumentsError, BootError, HostError, NoAgentError, NotThereError, ShimError
from agent_shim.core.paths import VCAP, Paths

VERSION: Final = f"{__version__} ({__revision__ or 'unknown revision'})"
USAGE: Final = 2
NO: Final = 1

UP: Final = frozenset({"running", "settling"})
REACHED: Final = {
    "start": UP,
    "restart": UP,
    "monitor": UP,
    "stop": frozenset({"stopped"}),
    "unmonitor": frozenset({"unmonitored", "stopped"}),
}
"""Maps each action on a service to the phases in which the service can be once the action is complete."""

CHANGES: Final = {
    "start": "start services and their dependencies",
    "stop": "stop services and their dependents",
    "restart": "stop services and start them again",
    "monitor": "monitor services, and start those that are not running",
    "unmonitor": "stop monitoring services",
}
"""Names and help texts of the actions on services."""

DEFAULT_LINES: Final = 25
STATUS_LINES: Final = 3
"""How many lines of each log file are shown after a process's status."""
SHELLS: Final = {"bash": "agent-shim.bash", "zsh": "_agent-shim", "fish": "agent-shim.fish"}
"""The shell completion files in ``cli/completion``, by shell."""
KINDS: Final = ("monit", "bpm", "agent", "settings")


def main(argv: Sequence[str]) -> int:
    """Run ``agent-shim``: parse the command line, run the command, and return the exit code (listed in
    docs/commands.md).
    """
    grammar = parser()
    args, surplus = grammar.parse_known_args(argv)
    if surplus:
        getattr(args, "parser", grammar).error(f"unrecognized arguments: {' '.join(surplus)}")
    if args.command is None:
        grammar.print_help(sys.stderr)
        return USAGE
    is_daemon: bool = args.run is _run
    if is_daemon:  # it handles its own errors and signals
        return _run(args)
    code = 0
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except ShimError as exc:
        _complain(str(exc))
        return exc.exit_code
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. That is not an error. Replace stdout, because Python would
        # otherwise fail to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return code
    except OSError as exc:
        # The message of a HostError already says what cannot be done.
        why = exc if isinstance(exc, HostError) else f"cannot {args.command}: {exc}"
        _complain(str(why))
        is_not_there = exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)
        return NotThereError.exit_code if is_not_there else NO
    except KeyboardInterrupt:
        # Let the signal kill this process, so that the shell also ends a loop around the command.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        raise


def bosh_agent(argv: Sequence[str]) -> int:
    """Run ``bosh-agent``, which is the daemon. It takes the flags that CPIs and unit files pass, in the syntax of Go's
    flag package (one dash or two, and the value in the next word or after ``=``).

    ``bosh-agent compile`` compiles releases instead.
    """
    if list(argv[:1]) == ["compile"]:
        from agent_shim.cli import compile_release

        return compile_release.main(argv[1:])
    words = []
    for word in argv:
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            words += [f"-{name}", value] if equals else [f"-{name}"]
        else:
            words.append(word)
    parser = argparse.ArgumentParser(
        prog="bosh-agent",
        description="The BOSH agent in this container.",
        epilog="bosh-agent compile --help describes the compilation of releases without a Director.",
    )
    _daemon_options(parser)
    parser.add_argument("-help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("-v", "-version", action="store_true", dest="version", help="print the version")
    parser.add_argument("-r", "-no-alerts", action="store_true", dest="ignored", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.version:
        print(f"[Version] {VERSION}")
        return 0
    return _daemon("bosh-agent", args)


EXAMPLES: Final[dict[str, str]] = {
    "run": """
  agent-shim run -C /var/vcap/bosh/agent.json
  agent-shim run -C agent.json -b /tmp/vcap --http 127.0.0.1:9190 --log-format text --log-level debug""",
    "monit": """
  agent-shim monit -c /var/vcap/bosh/etc/monitrc
  agent-shim monit -c monitrc -b /tmp/vcap --http 127.0.0.1:9190""",
    "status": """
  agent-shim status
  agent-shim status --watch
  agent-shim status web
  agent-shim status --json | jq -r '.processes[] | select(.state != "running") | .name'""",
    "start": """
  agent-shim start web
  agent-shim start all --wait""",
    "stop": """
  agent-shim stop web worker --wait""",
    "restart": """
  agent-shim restart web --wait && agent-shim logs web""",
    "monitor": """
  agent-shim monitor web""",
    "unmonitor": """
  agent-shim unmonitor web      # during an investigation""",
    "logs": """
  agent-shim logs               # the last lines of every job
  agent-shim logs web -f -n 100
  agent-shim logs web --since 10m
  agent-shim logs --agent -f    # the agent's own log""",
    "call": """
  agent-shim call ping
  agent-shim call get_state full
  agent-shim call run_script pre-start '{}'""",
    "check": """
  agent-shim check jobs/web/monit jobs/web/config/bpm.yml
  agent-shim check --strict jobs/*/monit
  agent-shim check --as settings warden-cpi-agent-env""",
    "try": """
  agent-shim try nginx-1.2.tgz --publish 8080:80
  agent-shim try redis-15.tgz --manifest redis.yml --only redis""",
    "render": """
  agent-shim render manifest.yml release.tgz --out rendered
  agent-shim render manifest.yml ~/nginx-release --group web --only nginx --out rendered
  agent-shim render manifest.yml release.tgz --index 1 --address 10.0.0.5 --out rendered
  agent-shim render manifest.yml release.tgz --group web --kubernetes --out web""",
    "probe": """
  agent-shim probe live
  agent-shim probe ready        # exit code 1 and the reason if not ready""",
    "drain": """
  agent-shim drain
  agent-shim drain --timeout 50 # in a preStop hook of a pod with 60 seconds""",
    "doctor": """
  agent-shim doctor
  kubectl exec web-0 -- /opt/agent_shim/bin/agent-shim doctor
  kubectl exec web-0 -- /opt/agent_shim/bin/agent-shim doctor --patch > patch.yaml
  kubectl patch statefulset web --patch-file patch.yaml
  agent-shim doctor --json | jq '.findings[] | select(.verdict == "wrong")'""",
    "handback": """
  sv exit agent && agent-shim handback""",
    "demo": """
  agent-shim demo
  agent-shim demo --keep        # and try commands in another terminal""",
    "completion": """
  agent-shim completion bash > ~/.local/share/bash-completion/completions/agent-shim
  agent-shim completion zsh > ~/.zfunc/_agent-shim
  agent-shim completion fish > ~/.config/fish/completions/agent-shim.fish""",
    "help": """
  agent-shim help logs""",
    "version": """
  agent-shim version""",
}
"""Examples that ``--help`` shows below a command's options."""


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the most similar known word when a word is unknown."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit."""
        if found := re.search(r"invalid choice: '([^']*)'", message):
            known = [str(choice) for action in self._actions for choice in action.choices or ()]
            message += _did_you_mean(found[1], known)
        elif found := re.match(r"unrecognized arguments: .*?(--[\w-]+)", message):
            known = [option for action in self._actions for option in action.option_strings]
            message += _did_you_mean(found[1], known)
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``agent-shim``. The ``run`` attribute of the parsed arguments is the command's function."""
    top = Parser(
        prog="agent-shim",
        description="A BOSH agent and process supervisor for containers and pods.",
        epilog="agent-shim COMMAND --help shows options and examples. Most commands ask the running agent.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"agent-shim {VERSION}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"examples:{EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run, parser=added)
        return added

    _add_daemon(command)
    _add_for_operators(command)
    for action, text in CHANGES.items():
        change = command(action, _change, text)
        change.add_argument("names", nargs="+", metavar="NAME", help="name of a service, or all")
        change.add_argument(
            "--wait", action="store_true", help="wait until the action is done; exit with 1 if it fails"
        )
        _base_option(change)
        change.set_defaults(action=action)
    _add_for_tools(command)
    demo = command("demo", _demo, "start a temporary agent, and deploy a small release to it with a scripted Director")
    demo.add_argument(
        "--keep", action="store_true", help="keep the Director, the bus and the agent running until Ctrl-C"
    )
    completion = command("completion", _completion, "print the completion script for a shell")
    completion.add_argument("shell", choices=tuple(SHELLS), help="bash, zsh or fish")
    of_help = command("help", _help, "describe a command, or list all commands")
    of_help.add_argument("topic", nargs="?", metavar="COMMAND", help="name of a command")
    of_help.set_defaults(top=top)
    command("version", _version, "print the version and the revision")
    return top


Command = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
"""A function that adds a command, and returns its parser. The arguments are the command's name, the function that runs
it, and its help text.
"""


def _add_daemon(command: Command) -> None:
    """Add the two commands that run in the foreground until a signal stops them."""
    run = command("run", _run, "run the daemon in the foreground")
    _daemon_options(run)
    run.add_argument("--http", metavar="ADDR:PORT|off", help="address of metrics and probes")
    text = "format of the agent's log (default: text on a terminal, otherwise json)"
    run.add_argument("--log-format", choices=("json", "text"), default="", help=text)
    levels = ("debug", "info", "warning", "error")
    run.add_argument("--log-level", choices=levels, default="", help="lowest level to log")
    run.add_argument("--job-logs", action="store_true", help="copy the jobs' log files to standard output")
    text = "run only the process supervisor in the foreground, replacing monit under another agent"
    monit = command("monit", _monit, text)
    monit.add_argument(
        "-c", dest="control_file", type=Path, required=True, metavar="MONITRC", help="monit's control file"
    )
    monit.add_argument("-I", action="store_true", help="accepted for compatibility")
    _base_option(monit)
    monit.add_argument(
        "--http", default="off", metavar="ADDR:PORT|off", help="address of metrics and probes (default: off)"
    )
    monit.add_argument("--bpm", action="store_true", help="run the processes in bpm.yml without the bpm program")
    monit.add_argument("--log-level", choices=levels, default="info", help="lowest level to log")


def _add_for_operators(command: Command) -> None:
    """Add the commands with which operators examine and stop a running instance."""
    status = command(
        "status", _status, "show the bus connection, the vitals and all processes, or details about the named processes"
    )
    text = "show all details of these processes; exit with 1 if one is not running"
    status.add_argument("names", nargs="*", metavar="NAME", help=text)
    status.add_argument("--json", action="store_true", help="print JSON")
    status.add_argument("--watch", action="store_true", help="keep refreshing until Ctrl-C")
    text = "refresh interval in seconds (default: 2)"
    status.add_argument("--every", type=_seconds, default=2.0, metavar="S", help=text)
    _base_option(status)

    logs = command("logs", _logs, "print the jobs' log files")
    logs.add_argument("job", nargs="?", default="", metavar="JOB", help="only this job")
    logs.add_argument("-f", "--follow", action="store_true", help="follow the files")
    text = "print the last N lines of each file (default: 25, or all lines with --since)"
    logs.add_argument("-n", "--lines", type=_count, metavar="N", help=text)
    logs.add_argument(
        "--since",
        type=_moment,
        metavar="TIME",
        help="print only lines written since TIME: a time of day (14:00) or how long ago (10m, 2h30m)",
    )
    logs.add_argument("--agent", action="store_true", help="print the agent's own log")
    _base_option(logs)

    doctor = command("doctor", _doctor, "test what this container allows, and suggest changes to its manifest")
    output = doctor.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    text = "print the changes as a kubectl patch for the template of a StatefulSet or Deployment (default) or for a pod"
    output.add_argument("--patch", nargs="?", const="template", choices=("template", "pod"), help=text)
    text = "the container that --patch changes (default: this one, if the kubelet reveals its name)"
    doctor.add_argument("--container", metavar="NAME", help=text)
    doctor.add_argument("-C", dest="config", type=Path, metavar="agent.json", help="the agent's configuration")
    _base_option(doctor)

    text = "stop all jobs in order, as when the container is stopped: pre-stop, drain, stop, post-stop"
    drain = command("drain", _drain, text)
    text = "time limit for all steps together, in seconds (default: AgentShim.grace in agent.json)"
    drain.add_argument("--timeout", type=_seconds, metavar="S", help=text)
    text = "if a drain is already running, end its scripts early, as PID 1 does when it gets SIGTERM"
    drain.add_argument("--hurry", action="store_true", help=text)
    _base_option(drain)


def _add_for_tools(command: Command) -> None:
    """Add the commands for scripts, release authors and pod manifests."""
    call = command("call", _call, "send a request to the running agent, as a Director does")
    call.add_argument("method", help="name of the action")
    call.add_argument("arguments", nargs="*", metavar="ARG", help="JSON, or a plain string")
    _base_option(call)

    check = command("check", _check, "validate configuration files")
    text = "treat the files as being of this kind, regardless of their names"
    check.add_argument("--as", dest="kind", choices=KINDS, help=text)
    text = "print each file's errors and warnings as JSON"
    check.add_argument("--json", action="store_true", dest="as_json", help=text)
    check.add_argument("--strict", action="store_true", help="treat statements and keys without effect as errors")
    text = "monit file, bpm.yml, agent.json or settings"
    check.add_argument("files", nargs="+", type=Path, metavar="FILE", help=text)

    trial = command("try", _try, "compile a release, render its jobs with their defaults, and run them in a container")
    text = "release tarball, either with sources or compiled for the image"
    trial.add_argument("release", type=Path, metavar="RELEASE", help=text)
    text = "this project's image with compilers (default: agent-shim)"
    trial.add_argument("--image", default="agent-shim", metavar="IMAGE", help=text)
    text = "deployment manifest (default: one instance with all jobs)"
    trial.add_argument("--manifest", type=Path, metavar="FILE", help=text)
    trial.add_argument("--group", default="", metavar="GROUP", help="instance group, if the manifest has several")
    trial.add_argument("--only", action="append", metavar="JOB", help="only this job")
    trial.add_argument("--name", metavar="NAME", help="name of the container (default: try-RELEASE)")
    text = "publish the container's PORT as HOST_PORT on this machine"
    trial.add_argument("--publish", action="append", metavar="HOST_PORT:PORT", help=text)
    trial.add_argument("--tool", choices=("podman", "docker"), help="container tool (default: whichever is installed)")
    text = "seconds to wait until all processes are running (default: 300)"
    trial.add_argument("--timeout", type=_seconds, default=300.0, metavar="S", help=text)

    text = "render an instance group's templates with Ruby, for an agent without a Director"
    render = command("render", _render, text)
    render.add_argument("manifest", type=Path, metavar="MANIFEST", help="deployment manifest without variables")
    text = "directory or tarball of a release that contains some of the group's jobs"
    render.add_argument("releases", nargs="+", type=Path, metavar="RELEASE", help=text)
    render.add_argument("--group", default="", metavar="GROUP", help="instance group, if the manifest has several")
    render.add_argument("--only", action="append", metavar="JOB", help="only this job")
    text = "output directory for jobs, packages and instance.json; set AgentShim.spec in agent.json to it"
    render.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    text = "index of the instance in its group (default: AGENT_SHIM_INDEX, which may be a pod's name, or 0)"
    render.add_argument("--index", type=int, metavar="N", help=text)
    text = "IP address of the instance (default: AGENT_SHIM_ADDRESS, the static IP, or 127.0.0.1)"
    render.add_argument("--address", metavar="IP", help=text)
    text = "zone of the instance (default: AGENT_SHIM_AZ, or the group's azs in turn)"
    render.add_argument("--az", metavar="ZONE", help=text)
    text = "whether this is the bootstrap instance (default: AGENT_SHIM_BOOTSTRAP, or true if the index is 0)"
    render.add_argument("--bootstrap", action=argparse.BooleanOptionalAction, help=text)
    text = "pattern for instance addresses in links, with {group} {index} {id} {az} {network} {deployment}"
    render.add_argument("--addresses", default="", metavar="PATTERN", help=text)
    text = "pattern for a whole group's address in links, instead of its bosh-dns name"
    render.add_argument("--group-address", default="", metavar="PATTERN", help=text)
    text = "write Kubernetes manifests for pods that render their own instances"
    render.add_argument("--kubernetes", action="store_true", help=text)
    text = "with --kubernetes, the image for the pods (default: agent-shim)"
    render.add_argument("--image", default="agent-shim", metavar="IMAGE", help=text)
    text = "with --kubernetes, the image for the init containers (default: agent-shim-releases)"
    render.add_argument("--renderer", default="agent-shim-releases", metavar="IMAGE", help=text)

    probe = command(
        "probe", _probe, "for exec probes: check whether the agent process is alive, or report the result of /readyz"
    )
    text = "check that the agent process exists (live), or report the result of /readyz (ready)"
    probe.add_argument("kind", choices=("live", "ready"), help=text)
    _base_option(probe)

    text = "prepare the state and the jobs for the Go agent and monit (stop this agent first)"
    _base_option(command("handback", _handback, text))


def _seconds(text: str) -> float:
    """Parse a positive number of seconds, at most a day."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400")
    return value


def _count(text: str) -> int:
    """Parse a non-negative number of lines."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of lines")
    return int(text)


def _moment(text: str) -> float:
    """Parse the value of ``--since``, and return it in seconds since 1970."""
    from agent_shim.services.logs import since

    try:
        return since.moment(text, time.time())  # noqa: TID251 - log lines contain wall-clock times
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _base_option(parser: argparse.ArgumentParser) -> None:
    text = "root directory instead of /var/vcap"
    parser.add_argument("-b", dest="base", type=Path, default=VCAP, metavar="DIR", help=text)


def _daemon_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``agent-shim run`` and ``bosh-agent`` have in common."""
    parser.add_argument("-C", dest="config", type=Path, metavar="agent.json", help="the agent's configuration")
    _base_option(parser)
    parser.add_argument("-P", dest="platform", metavar="NAME", help="accepted for compatibility")
    parser.add_argument("-M", dest="supervisor", metavar="NAME", help="accepted for compatibility")


def _run(args: argparse.Namespace) -> int:
    return _daemon("agent-shim", args, args.http, args.log_format, args.log_level, args.job_logs)


def _daemon(program: str, args: argparse.Namespace, *options: Any) -> int:
    """Run the daemon, print its error if it fails, and return the exit code. ``options`` are the remaining fields
    of ``RunOptions``.
    """
    # Garbage collection would take up a tenth of the time for the imports, and free almost nothing.
    gc.disable()
    try:
        from agent_shim.daemon import main as daemon

        gc.enable()
        return daemon.main(daemon.RunOptions(args.config, Paths(args.base.absolute()), *options))
    except (ShimError, HostError) as exc:
        _complain(str(exc), program)
        return exc.exit_code if isinstance(exc, ShimError) else BootError.exit_code


def _monit(args: argparse.Namespace) -> int:
    from agent_shim.daemon import monit_daemon

    paths = Paths(args.base.absolute())
    options = monit_daemon.MonitDaemonOptions(args.control_file.absolute(), paths, args.http, args.log_level, args.bpm)
    return monit_daemon.main(options)


def _complain(text: str, program: str = "agent-shim") -> None:
    print(safetext.lines(f"{program}: {text}"), file=sys.stderr)


def _ask(args: argparse.Namespace, request: dict[str, Any], *, timeout: float | None = 60.0) -> Any:
    """Send a request to the running agent and return its reply. ``timeout`` is in seconds, or None to wait without a
    limit. Raises ``NoAgentError``.
    """
    from agent_shim.edges import control_client

    return control_client.ask(Paths(args.base.absolute()).control_socket, request, timeout=timeout)


def _call(args: argparse.Namespace) -> int:
    """Send a request as a Director does, and print the reply. Return ``NO`` if it contains an exception."""
    arguments = [_argument(text) for text in args.arguments]
    _check_call(args, arguments)
    reply = _ask(args, {"method": args.method, "arguments": arguments, "protocol": 3})
    print(safetext.lines(json.dumps(reply, indent=2, ensure_ascii=False)))
    return NO if "exception" in reply else 0


def _check_call(args: argparse.Namespace, arguments: list[Any]) -> None:
    """Exit with a usage error unless the action accepts ``arguments``. Surplus arguments are an error here, although a
    request on the bus may contain some.
    """
    from agent_shim.actions import dispatch
    from agent_shim.daemon import runtime  # noqa: F401 - importing registers the actions

    grammar: Parser = args.parser
    action = dispatch.ACTIONS.get(args.method)
    if action is None:
        grammar.error(f"there is no method {args.method}{_hint(args.method, dispatch.ACTIONS)}")
    if len(arguments) > (most := len(action.parameters)):
        grammar.error(f"{args.method} takes at most {most} argument{'s' * (most != 1)}, not {len(arguments)}")
    try:
        action.bind(arguments)
    except BadArgumentsError as exc:
        grammar.error(f"cannot call {args.method}: {exc}")


def _argument(text: str) -> Any:
    """Parse an argument as JSON. If it is not JSON, return it unchanged."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def _drain(args: argparse.Namespace) -> int:
    """Stop all jobs and wait without a timeout, because the agent itself limits the time. Return ``NO`` if the
    stop was not clean. Raises ``NoAgentError`` if no agent answers, or if the agent cannot stop the jobs yet.
    """
    answer = _ask(args, {"command": "drain", "timeout": args.timeout, "hurry": args.hurry}, timeout=None)
    if "exception" in answer:
        raise NoAgentError(answer["exception"]["message"])
    print(safetext.lines(answer["summary"]))
    return 0 if answer["clean"] else NO


def _change(args: argparse.Namespace) -> int:
    """Start, stop or otherwise change services. With ``--wait``, return ``NO`` if the action fails for any of the
    services.
    """
    request = {"command": "services", "action": args.action, "names": args.names, "wait": args.wait}
    answer = _ask(args, request, timeout=None if args.wait else 60.0)
    if "exception" in answer:
        _refuse_unknown(args)  # raises a more helpful error if a name is unknown
        _complain(f"cannot {args.action}: {answer['exception']['message']}")
        return NO
    wanted = REACHED[args.action]
    failed = [service for service in answer["services"] if args.wait and service["phase"] not in wanted]
    for service in failed:
        why = f": {service['reason']}" if service["reason"] else ""
        _complain(safetext.line(f"cannot {args.action} {service['name']}: it is {service['phase']}{why}"))
    return NO if failed else 0


def _refuse_unknown(args: argparse.Namespace) -> None:
    """Raise ``NotThereError`` if any of ``args.names`` is not a service. The error names the first unknown one, and
    lists the known services.
    """
    known = [service["name"] for service in _ask(args, {"command": "services", "action": "show"}).get("services", ())]
    for name in args.names:
        if name != "all" and name.lower() not in {service.lower() for service in known}:
            raise NotThereError(f"cannot {args.action} {name}: there is no such service{_hint(name, known)}")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    from agent_shim.core import config_check  # imported late, because it is needed only for an unknown word

    return config_check.did_you_mean(word, known)


def _hint(word: str, known: Iterable[str]) -> str:
    """Return a hint with the most similar known word, followed by all known words."""
    names = sorted(known)
    return f"{_did_you_mean(word, names)} (there are {', '.join(names) or 'none'})"


def _probe(args: argparse.Namespace) -> int:
    from agent_shim.cli import probe

    return probe.main((args.kind, str(args.base.absolute())))


def _status(args: argparse.Namespace) -> int:
    """Print the status page. With ``--watch``, refresh it until Ctrl-C, even while no agent is running."""
    if not args.watch:
        page, code = _status_page(args)
        print(page)
        return code
    from agent_shim.cli import ansi

    # On a terminal, redraw the page in place. If the output is a pipe, write one page after another.
    is_screen = ansi.is_for_people(sys.stdout) and not args.json
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as at_end:
        if is_screen:
            print(ansi.BEGIN_SCREEN, end="")
            at_end.callback(print, ansi.END_SCREEN, end="", flush=True)
        while True:
            try:
                page, _ = _status_page(args)
            except NoAgentError as exc:
                page = str(exc)
            print(ansi.screen(page) if is_screen else f"{page}\n", end="" if is_screen else "\n", flush=True)
            time.sleep(args.every)  # noqa: TID251 a command has no event loop
    return 0


def _status_page(args: argparse.Namespace) -> tuple[str, int]:
    """Return the status page for all processes or for the named ones, and the exit code, which is ``NO`` if a named
    process is not running. With ``--json`` and ``--watch``, a page is a single line.
    """
    from agent_shim.cli import ansi, status_text

    status = _ask(args, {"command": "status"})
    processes = _named(args.names, status["processes"])
    code = 0 if all(process["state"] == "running" for process in processes) else NO
    if args.json:
        found = processes if args.names else status
        return safetext.lines(json.dumps(found, indent=None if args.watch else 2, ensure_ascii=False)), code
    paint = ansi.paint_for(sys.stdout)
    if args.names:
        pages = (
            status_text.details(safetext.value(process), paint, _last_lines(args, process["job"]))
            for process in processes
        )
        return "\n\n".join(pages), code
    columns, lines = _terminal_size()
    return status_text.render(safetext.value(status), paint, columns, lines if args.watch else 0), code


def _terminal_size() -> tuple[int, int]:
    """Return the columns and lines of the terminal on stdout, or zeros for a pipe."""
    import shutil  # imported late, because it loads compression libraries that the daemon does not need

    if not sys.stdout.isatty():
        return 0, 0
    columns, lines = shutil.get_terminal_size()
    try:
        "…".encode(sys.stdout.encoding)
    except UnicodeEncodeError:  # the encoding has no ellipsis, so a clipped line has to end with three dots
        columns -= 2
    return columns, lines


def _last_lines(args: argparse.Namespace, job: str) -> list[str]:
    """Return the last lines of each of a job's log files. Files that this user cannot read are skipped."""
    from agent_shim.services.logs import tail

    with contextlib.closing(tail.Follower(Paths(args.base.absolute()).log, job)) as follower:
        return [safetext.line(f"{line.file} | {line.text}") for line in follower.last(STATUS_LINES)]


def _named(names: Sequence[str], processes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the processes that ``names`` lists, in that order. Raises ``NotThereError`` if one does not exist."""
    known = {process["name"]: process for process in processes}
    if unknown := [name for name in names if name not in known]:
        raise NotThereError(f"cannot show {', '.join(unknown)}: there is no such process{_hint(unknown[0], known)}")
    return [known[name] for name in names]


def _logs(args: argparse.Namespace) -> int:
    """Print and follow log files. Return ``NO`` if some of them cannot be read, but 0 after Ctrl-C."""
    from agent_shim.cli import ansi
    from agent_shim.services.logs import since, tail

    encoded = partial(str.encode, encoding=sys.stdout.encoding, errors=sys.stdout.errors or "strict")
    paths, paint, is_terminal = Paths(args.base.absolute()), ansi.paint_for(sys.stdout), sys.stdout.isatty()
    if args.agent and args.job:
        args.parser.error("--agent shows the agent's own log, so no job can be named")
    # ``tail.Follower`` looks for a job's log files in ``directory/job``. The agent's own log is in bosh/log.
    directory, job = (paths.agent_log.parent, "log") if args.agent else (paths.log, args.job)
    _refuse_missing(paths, directory, job, is_agent=args.agent)
    refused: dict[str, str] = {}
    names = tail.AGENT_FILES if args.agent else tail.JOB_FILES
    follower = tail.Follower(directory, job, names=names, refused=refused.setdefault)
    wanted = None if args.since is None else since.Since(args.since)
    count = args.lines if args.lines is not None else DEFAULT_LINES if wanted is None else sys.maxsize

    def show(line: tail.LogLine) -> None:
        prefix = "" if args.agent else f"{paint(safetext.line(f'{line.job}/{line.file} |'), 'faint')} "
        # Escape the text for a terminal, which would execute escape sequences. A pipe or file gets the original bytes.
        text = encoded(safetext.lines(line.text)) if is_terminal else line.raw
        sys.stdout.buffer.write(encoded(prefix) + text + b"\n")
        if args.follow:
            sys.stdout.flush()

    try:
        for line in follower.last(count):
            changed = partial(follower.changed_at, line)
            if wanted is None or wanted.is_wanted(f"{line.job}/{line.file}", line.raw, changed):
                show(line)
        sys.stdout.flush()
        for path, why in sorted(refused.items()):
            # The path of the directory itself is "".
            _complain(safetext.line(f"cannot show {path or directory}: {why}"))
        is_complete = not refused
        while args.follow:
            time.sleep(tail.POLL_S)  # noqa: TID251 a command has no event loop
            for line in follower.poll():
                show(line)
    except KeyboardInterrupt:
        return 0
    finally:
        follower.close()
    return 0 if is_complete else NO


def _refuse_missing(paths: Paths, directory: Path, job: str, *, is_agent: bool) -> None:
    """Raise ``NotThereError`` unless the base and ``directory`` exist and, if ``job`` is given, ``directory`` contains
    its logs.
    """
    what = "the agent's log" if is_agent else "logs"
    try:
        paths.base.stat()
        with os.scandir(directory) as entries:
            known = [entry.name for entry in entries if entry.is_dir()]
    except FileNotFoundError as exc:
        raise NotThereError(f"cannot show {what}: there is no directory {exc.filename} (set the base with -b)") from exc
    except OSError as exc:
        raise NotThereError(f"cannot show {what}: {exc.filename}: {exc.strerror}") from exc
    if job and job not in known:
        raise NotThereError(f"cannot show {what}: there are no logs of {job}{_hint(job, known)}")


def _check(args: argparse.Namespace) -> int:
    from agent_shim.cli import check

    return check.main(args.files, args.kind, as_json=args.as_json, is_strict=args.strict)


def _try(args: argparse.Namespace) -> int:
    from agent_shim.cli import try_release

    return try_release.main(args)


def _render(args: argparse.Namespace) -> int:
    from agent_shim.cli import render

    return render.main(args)


def _doctor(args: argparse.Namespace) -> int:
    """Print the doctor's report as a patch, as JSON or as a table. Return ``NO`` if the table or the JSON contains the
    verdict ``wrong``. For a patch, always return 0.
    """
    from agent_shim.cli import ansi, doctor
    from agent_shim.cli.doctor import finding
    from agent_shim.host import capabilities

    paths = Paths(args.base.absolute())
    if args.patch:
        from agent_shim.cli.doctor import patch

        report = doctor.examine(paths, args.config, "pod")
        name = args.container or doctor.container_name() or patch.PLACEHOLDER
        print(patch.patch(report, name, capabilities.privileges().effective, args.patch), end="")
        return 0
    report = doctor.examine(paths, args.config)
    if args.json:
        found = [finding._asdict() for finding in report.findings]
        print(json.dumps({"tier": report.tier, "clean": report.is_clean, "findings": found}, indent=2))
    else:
        print(finding.table(report, ansi.paint_for(sys.stdout), _terminal_size()[0]))
    return 0 if report.is_clean else NO


def _handback(args: argparse.Namespace) -> int:
    from agent_shim.daemon import handback

    print("\n".join(handback.hand_back(Paths(args.base.absolute()))))
    return 0


def _demo(args: argparse.Namespace) -> int:
    from agent_shim.demo import play

    return play.main(keep=args.keep)


def _completion(args: argparse.Namespace) -> int:
    print(Path(__file__).with_name("completion").joinpath(SHELLS[args.shell]).read_text(), end="")
    return 0


def _help(args: argparse.Namespace) -> int:
    args.top.parse_args([args.topic, "--help"] if args.topic else ["--help"])  # prints the help and exits
    return 0


def _version(_: argparse.Namespace) -> int:
    print(f"agent-shim {VERSION}")
    return 0
