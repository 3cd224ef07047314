"""The commands ``agent-shim`` and ``bosh-agent``. Each imports what it needs when it runs: a probe must cost little."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from agent_shim import __version__
from agent_shim.errors import NoAgentError, ShimError
from agent_shim.paths import VCAP, Paths

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
"""What a service has come to when it was done."""

KINDS: Final = ("monit", "bpm", "agent", "settings")


def main(argv: Sequence[str] | None = None) -> int:
    """``agent-shim``: the exit code says who has to act (docs/operations.md lists them)."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        return command(args)
    except ShimError as exc:
        print(f"agent-shim: {exc}", file=sys.stderr)
        return exc.exit_code
    except BrokenPipeError:
        # Somebody closed the pipe we print into, as `head` does: no news for anybody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def bosh_agent(argv: Sequence[str] | None = None) -> int:
    """``bosh-agent``: the same daemon with the flags CPIs and unit files pass, in the manner of Go's flag package."""
    given = list(sys.argv[1:] if argv is None else argv)
    spread = []
    for word in given:
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            spread += [f"-{name}", value] if equals else [f"-{name}"]
        else:
            spread.append(word)
    parser = argparse.ArgumentParser(prog="bosh-agent", description="The BOSH agent of this container.")
    _daemon_options(parser)
    parser.add_argument("-v", action="store_true", dest="version", help="print the version")
    parser.add_argument("-r", "-no-alerts", action="store_true", dest="ignored", help=argparse.SUPPRESS)
    args = parser.parse_args(spread)
    if args.version:
        print(f"[Version] {__version__}")
        return 0
    try:
        return _run(args)
    except ShimError as exc:
        print(f"bosh-agent: {exc}", file=sys.stderr)
        return exc.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agent-shim", description="A BOSH agent and process supervisor for containers and pods."
    )
    parser.add_argument("--version", action="version", version=f"agent-shim {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = commands.add_parser("run", help="the daemon, in the foreground")
    _daemon_options(run)
    run.add_argument("--http", metavar="ADDR:PORT|off", help="where metrics and probes are served")
    run.add_argument("--log-format", choices=("json", "text"), default="")
    run.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="")
    run.set_defaults(run=_run)

    status = commands.add_parser("status", help="bus, vitals and a table of processes")
    status.add_argument("--json", action="store_true")
    _base_option(status)
    status.set_defaults(run=_status)

    for action in ("start", "stop", "restart", "monitor", "unmonitor"):
        change = commands.add_parser(action, help=f"{action} services by name")
        change.add_argument("names", nargs="+", metavar="NAME", help="of a service, or all")
        change.add_argument("--wait", action="store_true", help="until it is done; 1 if it could not be")
        _base_option(change)
        change.set_defaults(run=_change, action=action)

    call = commands.add_parser(
        "call",
        help="ask the running agent what the Director would ask over the bus",
        epilog="example: agent-shim call get_state full",
    )
    call.add_argument("method")
    call.add_argument("arguments", nargs="*", metavar="ARG", help="JSON, or else a plain string")
    _base_option(call)
    call.set_defaults(run=_call)

    check = commands.add_parser(
        "check", help="look at files for mistakes", epilog="example: agent-shim check jobs/web/monit"
    )
    check.add_argument("--as", dest="kind", choices=KINDS, help="what the files are, where their names do not say it")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE")
    check.set_defaults(run=_check)

    probe = commands.add_parser("probe", help="the answer of /healthz or /readyz, for exec probes")
    probe.add_argument("kind", choices=("live", "ready"))
    _base_option(probe)
    probe.set_defaults(run=_probe)

    drain = commands.add_parser(
        "drain", help="stop all jobs in order, as before the end of the container: pre-stop, drain, stop, post-stop"
    )
    drain.add_argument(
        "--timeout", type=float, metavar="S", help="seconds that all of it may take (default: the grace)"
    )
    _base_option(drain)
    drain.set_defaults(run=_drain)

    handback = commands.add_parser(
        "handback", help="leave state and jobs so that the BOSH agent and monit can take over (end this agent first)"
    )
    _base_option(handback)
    handback.set_defaults(run=_handback)

    doctor = commands.add_parser(
        "doctor", help="what this container allows, what follows, and what to change in its manifest"
    )
    doctor.add_argument("--json", action="store_true")
    doctor.add_argument("-C", dest="config", type=Path, metavar="agent.json", help="the agent's configuration")
    _base_option(doctor)
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="a Director deploys a small release to an agent of its own")
    demo.set_defaults(run=_demo)
    return parser


def _base_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-b", dest="base", type=Path, default=VCAP, metavar="DIR", help="what stands for /var/vcap")


def _daemon_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-C", dest="config", type=Path, metavar="agent.json", help="the agent's configuration")
    _base_option(parser)
    parser.add_argument("-P", dest="platform", metavar="NAME", help="accepted for compatibility")
    parser.add_argument("-M", dest="supervisor", metavar="NAME", help="accepted for compatibility")


def _run(args: argparse.Namespace) -> int:
    from agent_shim import daemon

    return daemon.main(
        daemon.Options(
            config=args.config,
            paths=Paths(args.base.absolute()),
            http=getattr(args, "http", None),
            log_format=getattr(args, "log_format", ""),
            log_level=getattr(args, "log_level", ""),
        )
    )


def _ask(args: argparse.Namespace, request: dict[str, Any], *, timeout: float | None = 60.0) -> Any:
    from agent_shim import asking

    return asking.ask(Paths(args.base.absolute()).control_socket, request, timeout=timeout)


def _call(args: argparse.Namespace) -> int:
    reply = _ask(
        args, {"method": args.method, "arguments": [_argument(text) for text in args.arguments], "protocol": 3}
    )
    print(json.dumps(reply, indent=2, ensure_ascii=False))
    return NO if "exception" in reply else 0


def _argument(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _drain(args: argparse.Namespace) -> int:
    answer = _ask(args, {"command": "drain", "timeout": args.timeout}, timeout=None)
    if "exception" in answer:
        raise NoAgentError(answer["exception"]["message"])
    print(answer["summary"])
    return 0 if answer["clean"] else NO


def _change(args: argparse.Namespace) -> int:
    request = {"command": "services", "action": args.action, "names": args.names, "wait": args.wait}
    answer = _ask(args, request, timeout=None if args.wait else 60.0)
    if "exception" in answer:
        print(f"agent-shim: cannot {args.action}: {answer['exception']['message']}", file=sys.stderr)
        return NO
    wanted = REACHED[args.action]
    missed = [service for service in answer["services"] if args.wait and service["phase"] not in wanted]
    for service in missed:
        why = f": {service['reason']}" if service["reason"] else ""
        print(f"agent-shim: cannot {args.action} {service['name']}: it is {service['phase']}{why}", file=sys.stderr)
    return NO if missed else 0


def _probe(args: argparse.Namespace) -> int:
    answer = _ask(args, {"command": "probe", "kind": args.kind})
    print(answer["reason"])
    return 0 if answer["ok"] else NO


def _status(args: argparse.Namespace) -> int:
    status = _ask(args, {"command": "status"})
    if args.json:
        print(json.dumps(status, indent=2, ensure_ascii=False))
        return 0
    from agent_shim import status_text

    print(status_text.render(status))
    return 0


def _check(args: argparse.Namespace) -> int:
    from agent_shim import check

    return check.main(args.files, args.kind)


def _doctor(args: argparse.Namespace) -> int:
    from agent_shim import doctor, terminal
    from agent_shim.doctor import finding

    report = doctor.examine(Paths(args.base.absolute()), args.config)
    if args.json:
        found = [one._asdict() for one in report.findings]
        print(json.dumps({"tier": report.tier, "clean": report.is_clean, "findings": found}, indent=2))
    else:
        print(finding.table(report, terminal.paint_for(sys.stdout)))
    return 0 if report.is_clean else NO


def _handback(args: argparse.Namespace) -> int:
    from agent_shim import handback

    print("\n".join(handback.hand_back(Paths(args.base.absolute()))))
    return 0


def _demo(_: argparse.Namespace) -> int:
    from agent_shim.demo import play

    return play.main()


if __name__ == "__main__":
    sys.exit(main())
