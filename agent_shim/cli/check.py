"""``agent-shim check``: validate the content of configuration files, on any machine.

It does not check whether the users and paths in the files exist. A ``depends on`` target that no given file defines is
only a warning, because another job may define it. The command treats three things as errors although the daemon accepts
them:

- A program whose path is not absolute, or whose arguments look like a mistyped statement, as in ``start progam "/x"``.
- A start or stop program that is a ``bpm`` command for a process that the job's bpm.yml does not define.
- An unknown key in agent.json. The daemon ignores it with a warning, because the file may have been written for a newer
  version.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core import safetext, settings
from agent_shim.core.errors import ConfigError
from agent_shim.core.paths import Paths
from agent_shim.supervisor import plan
from agent_shim.supervisor.bpm import config
from agent_shim.supervisor.bpm.calls import bpm_call
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import Check, Connection, Ignored, MonitFile
from agent_shim.supervisor.monit.rules import UNSPOKEN_PROTOCOLS

GOOD: Final = 0
USAGE: Final = 2
MISSING: Final = 66
WRONG: Final = 78
UNMANAGED: Final = "lacks `group vcap`, so a Director does not start, stop or report it"


def kind_of(name: str) -> str:
    """Return the kind of a file according to its base name, or "" if the name does not reveal the kind."""
    if name == "monit" or name.endswith((".monit", ".monitrc")):
        return "monit"
    if name == "bpm.yml" or name.endswith(".bpm.yml"):
        return "bpm"
    if name.endswith(".json"):
        return "agent" if name.startswith("agent") else "settings"
    return ""


def main(files: Sequence[Path], kind: str | None, *, as_json: bool = False, is_strict: bool = False) -> int:
    """Check ``files``. Each is treated as a file of the kind ``kind`` or, if that is None, of the kind that its name
    indicates. Return the exit code of the worst result.

    If ``as_json`` is set, print a list of ``{file, kind, is_good, mistakes, warnings}``. If ``is_strict`` is set,
    statements and keys without effect are listed under ``mistakes`` rather than ``warnings``. Unknown keys in
    agent.json are always listed under ``mistakes``.
    """
    reports = [_FileReport(path, kind or kind_of(path.name)) for path in files]
    unknown = [report.file for report in reports if not report.kind]
    if unknown:
        print(f"agent-shim: cannot check {unknown[0]}: cannot tell its kind from its name (use --as)", file=sys.stderr)
        return USAGE
    parsed: list[MonitFile] = []
    for report in reports:
        ignored: list[str] = []
        try:
            _check(report, parsed, ignored)
        except ConfigError as exc:
            report.mistakes.append(str(exc))
        except OSError as exc:
            report.is_missing = True
            report.mistakes.append(f"cannot read {report.file}: {exc.strerror}")
        (report.mistakes if is_strict else report.warnings).extend(f"{report.file}: {text}" for text in ignored)
    by_origin = {str(report.file): report for report in reports}
    for problem in parser.problems(parsed):
        report = by_origin[problem.origin]
        # "missing" means that no given file defines the target of a `depends on`.
        (report.warnings if problem.kind == "missing" else report.mistakes).append(str(problem))
    if as_json:
        shown = safetext.value([report.as_json() for report in reports])
        print(msgspec.json.format(msgspec.json.encode(shown)).decode())
    else:
        for report in reports:
            report.show()
    if any(report.mistakes and not report.is_missing for report in reports):
        return WRONG
    return MISSING if any(report.is_missing for report in reports) else GOOD


def _check(report: _FileReport, parsed: list[MonitFile], unknown: list[str]) -> None:
    """Read a file as the daemon does. Raises ``ConfigError`` with all errors that the daemon would report.

    Errors that only this command reports are added to ``report.mistakes``, and so are unknown keys in agent.json. In
    all other files, keys and statements without effect are appended to ``unknown``, even if the file has errors. A
    monit file that the daemon would accept is appended to ``parsed``, whose files the caller checks together.
    """
    text, origin = report.file.read_bytes(), str(report.file)
    if report.kind == "monit":
        ignored: list[Ignored] = []
        try:
            file = parser.parse(_decoded(text, report.file), origin=origin, without_effect=ignored)
        finally:
            unknown += [f"line {statement.line}: not acted on: {statement.first_words}" for statement in ignored]
        parsed.append(file)
        for service in file.services:
            if service.kind == "process" and plan.VCAP not in service.groups:
                report.warnings.append(f"{origin}: line {service.line}: {service.name} {UNMANAGED}")
            if plan.is_never_restarted(plan.spec_of("", service)):
                unknown.append(f"line {service.line}: not acted on: {plan.NEVER_RESTARTED}")
            unknown += [
                f"line {rule.line}: not acted on: protocol {rule.test.protocol.name} (only the connection is tested)"
                for rule in service.rules
                if isinstance(rule.test, Connection) and rule.test.protocol.name in UNSPOKEN_PROTOCOLS
            ]
            report.mistakes += [f"{origin}: {wrong}" for wrong in _wrong_programs(service)]
            report.mistakes += [f"{origin}: {wrong}" for wrong in _wrong_calls(service, report.file)]
    elif report.kind == "bpm":
        content = _decoded(text, report.file)
        processes = config.parse(content, origin=origin, job=_job_of(report.file), unknown=unknown).processes
        names = [process.name for process in processes]
        unknown += ["there are no processes, so nothing runs"] * (not names)
        unknown += [
            f"{count} processes are named {name}, and only the first one runs"
            for name, count in Counter(names).items()
            if count > 1
        ]
    elif report.kind == "agent":
        unknown_keys: list[str] = []
        try:
            found = settings.parse_config(text, origin=origin, unknown=unknown_keys)
        finally:
            report.mistakes += [f"{origin}: {key}" for key in unknown_keys]
        files = ", ".join(str(path) for path in found.settings_files(Paths()))
        report.next_step = f"deploys {found.shim.spec}" if found.shim.spec else f"waits for settings in {files}"
    else:
        given = settings.parse(text, origin=origin, ignored=unknown)
        settings.require_bus(settings.Effective(given, settings.UpdateSettings()), origin)


def _job_of(file: Path) -> str:
    """Return the job to which a rendered file or template belongs, or "".

    Examples are ``JOB/config/bpm.yml`` and ``JOB/templates/bpm.yml``.
    """
    directory = file.absolute().parent
    return directory.parent.name if directory.name in ("config", "templates") else ""


def _wrong_calls(check: Check, file: Path) -> Iterator[str]:
    """Yield an error for each bpm process that ``check`` starts or stops although the job's bpm.yml does not define it.
    ``file`` is the monit file that contains ``check``.
    """
    for verb, program in (("start", check.start), ("stop", check.stop)):
        call = bpm_call(program.argv) if program is not None else None
        if call is None:
            continue
        home = file.absolute().parent
        # bpm.yml may be in this job's config directory, in the monit file's directory, or in another job's config
        # directory.
        paths = (home / "config/bpm.yml", home / "bpm.yml", home.parent / call.job / "config/bpm.yml")
        for path in filter(Path.is_file, paths if call.job == home.name else paths[1:]):
            with suppress(ConfigError, OSError):  # errors in bpm.yml are reported when bpm.yml itself is checked
                found = config.parse(_decoded(path.read_bytes(), path), origin=str(path))
                if found.process(call.process) is None:
                    known = ", ".join(process.name for process in found.processes) or "none"
                    missing = f"the process {call.process}, but {path} only defines: {known}"
                    yield f"line {check.line}: the {verb} program of {check.name} names {missing}"
            break  # only the first bpm.yml that exists counts


def _wrong_programs(check: Check) -> Iterator[str]:
    """Yield an error for each program in ``check`` that monit could not run or that looks mistyped. This covers the
    start program, the stop program and the programs in rules.
    """
    for verb, program in (("start", check.start), ("stop", check.stop)):
        if program is not None and not program.argv[0].startswith("/"):
            hint = f", expected '{verb} program \"/…\"'" if len(program.argv) > 1 else ""
            name = f"the {verb} program of {check.name}, '{program.argv[0]}'"
            yield f"line {check.line}: {name}, is not an absolute path{hint}"
        # monit reads a mistyped `stop program "/…"` as further arguments of the start program, and vice versa.
        missing = "stop" if check.stop is None else "start" if check.start is None else ""
        for word, path in pairwise(program.argv[1:] if program is not None and missing else ()):
            if path.startswith("/") and get_close_matches(word, [missing]):
                why = f"'{word}' is an argument of the {verb} program of {check.name}"
                yield f"line {check.line}: {why}, expected '{missing} program \"{path} …\"'"
    for rule in check.rules:
        for action in (rule.action, rule.recovery):
            if action.program is not None and not action.program.argv[0].startswith("/"):
                yield f"line {rule.line}: the program '{action.program.argv[0]}' is not an absolute path"


@dataclass
class _FileReport:
    """The errors and warnings found in one file."""

    file: Path
    kind: str
    is_missing: bool = False
    """True if the file cannot be read."""
    mistakes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    next_step: str = ""
    """What the daemon will do with the file."""

    def show(self) -> None:
        for warning in self.warnings:
            print(safetext.lines(f"warning: {warning}"), file=sys.stderr)
        for mistake in self.mistakes:
            print(safetext.lines(mistake), file=sys.stderr)
        if not self.mistakes:
            further = f", the agent {self.next_step}" if self.next_step else ""
            print(safetext.lines(f"{self.file}: good ({self.kind}){further}"))

    def as_json(self) -> dict[str, object]:
        about = {"file": str(self.file), "kind": self.kind, "is_good": not self.mistakes}
        return about | {"mistakes": self.mistakes, "warnings": self.warnings}


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text ({exc.reason} at byte {exc.start})") from exc
