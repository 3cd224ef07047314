"""Translates all jobs' monit files into specs of supervised services. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core.errors import ConfigError
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.bpm.calls import BpmCall, bpm_call, bpm_label
from agent_shim.supervisor.monit import ast as values
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import JobFile

VCAP: Final = "vcap"
"""The Director starts and stops the services in this group, and their state is reported to it. Services in other groups
are supervised as well.
"""

NEVER_RESTARTED: Final = "restart when it ends (it has no stop program)"


class RestartLimit(msgspec.Struct, frozen=True):
    """The action to take after ``count`` restarts within ``cycles`` monit cycles."""

    count: int
    cycles: int
    reaction: values.Action


class ProcessSpec(msgspec.Struct, frozen=True):
    """One supervised service. If it has an ``error``, it is invalid, and only ``name`` and ``job`` can be used.

    ``kind`` is the word after ``check``. A process is identified by ``pidfile`` or by ``pattern``, a regular
    expression for its command line. File, directory, fifo and filesystem checks have a ``path``, and host checks have
    an ``address``.
    """

    name: str
    job: str
    kind: values.Kind = "process"
    pidfile: str | None = None
    pattern: posix_regex.Pattern | None = None
    path: Path | None = None
    address: str = ""
    start: values.MonitProgram | None = None
    stop: values.MonitProgram | None = None
    start_call: BpmCall | None = None
    """The parsed call if the start program is bpm, otherwise None."""
    stop_call: BpmCall | None = None
    groups: frozenset[str] = frozenset({VCAP})
    depends: tuple[str, ...] = ()
    mode: values.Mode = "active"
    absence: values.Action = values.Action("restart")
    absence_cycles: int = 1
    """For how many monit cycles the process or path must be absent before the ``absence`` action is carried out."""
    change: values.Action = values.ALERT
    """The action that is carried out when the pid has changed."""
    limits: tuple[RestartLimit, ...] = ()
    rules: tuple[values.Rule, ...] = ()
    """All rules except those for absence, pid changes and the number of restarts. They are evaluated every ``every``
    cycles. The rules that monit itself adds for checks of paths come last.
    """
    passed_over: tuple[values.Match, ...] = ()
    """Patterns of lines that ``if match`` ignores."""
    every: int = 1
    unsupported: tuple[str, ...] = ()
    """Parsed statements that have no effect. Only their first words are kept, because the rest may contain a password.

    If the service is never restarted because it has no stop program, this is listed too, because the author of the
    monit file might not be aware of it.
    """
    error: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the service's keepers: its name and, if bpm writes the service's pidfile, the label of the bpm
        process.
        """
        parts = (self.pidfile or "").split("/")
        if parts[-4:-2] == ["run", "bpm"]:  # the pidfile is run/bpm/JOB/PROCESS.pid
            job, file_name = parts[-2:]
            return self.name, bpm_label(job, Path(file_name).stem)
        return (self.name,)

    @property
    def is_process(self) -> bool:
        """True if the check watches a process. Checks of a path, a host or the machine have no process."""
        return self.kind == "process"

    @property
    def absence_words(self) -> str:
        """monit's wording for a missing process or path (validate.c)."""
        return "process is not running" if self.is_process else f"{self.kind} doesn't exist"

    @property
    def is_restartable(self) -> bool:
        return not self.why_not_restarted

    @property
    def why_not_restarted(self) -> str:
        """The reason why the service is not restarted after an exit, or "" if the service is restarted.

        monit restarts only processes with a start and a stop program, and never passive services.
        """
        if self.absence.kind not in ("start", "restart"):
            return f"the rule for that says {self.absence.kind}"
        if self.mode == "passive":
            return "it is passive"
        if self.start is None:
            return "it has no start program"
        if self.is_process and self.absence.kind == "restart" and self.stop is None:
            return "it has no stop program, without which monit restarts nothing"
        return ""

    @property
    def is_vcap(self) -> bool:
        """True if the Director manages the service."""
        return VCAP in self.groups


def plan(
    files: Sequence[JobFile], *, has_bpm: bool = True, acted_on: frozenset[str] = frozenset()
) -> tuple[ProcessSpec, ...]:
    """Return all services' specs, in the order of the files. If ``has_bpm`` is set, the agent itself runs the processes
    that monit files start with bpm; otherwise, bpm is run like any other program.

    ``acted_on`` lists statements outside of checks on which the caller acts, by their first one or two words, such as
    ``include`` or ``set daemon``. These statements are not listed as unsupported.

    If one of a job's files is invalid or conflicts with other jobs' files, the job becomes a single service with an
    ``error``. The service is named after the job, with ``-monit`` appended if that name is already taken. Other jobs
    are not affected, because dependencies on that job's services are ignored.
    """
    parsed: list[tuple[str, values.MonitFile]] = []
    errors: dict[str, str] = {}
    for source in files:
        if source.job in errors:
            continue
        origin = f"{source.job}/{source.name}.monit" if source.name else f"{source.job}/monit"
        try:
            parsed.append((source.job, parser.parse(source.text, origin=origin)))
        except ConfigError as exc:
            errors[source.job] = str(exc)
    # Repeat this, because leaving out a job at fault may reveal further conflicts. The loop ends, because jobs that
    # already have an error are not examined again.
    while found := _problems(parsed, errors):
        errors |= found
    order = list(dict.fromkeys(file.job for file in files))
    specs = [spec for job, file in parsed if job not in errors for spec in _specs(job, file, acted_on)]
    if not has_bpm:
        specs = [msgspec.structs.replace(spec, start_call=None, stop_call=None) for spec in specs]
    taken = {spec.name.lower() for spec in specs}
    specs += [
        ProcessSpec(name=f"{job}-monit" if job.lower() in taken else job, job=job, error=error)
        for job, error in errors.items()
    ]
    return tuple(sorted(specs, key=lambda spec: order.index(spec.job)))


def _problems(parsed: Sequence[tuple[str, values.MonitFile]], errors: Mapping[str, str]) -> dict[str, str]:
    """Find conflicts between the monit files of those jobs that are not in ``errors``. Return an error message for each
    job at fault.
    """
    jobs = {file.origin: job for job, file in parsed}
    good = [file for job, file in parsed if job not in errors]
    return {
        jobs[problem.origin]: f"cannot use {problem.origin}: line {problem.line}: {problem.text}"
        for problem in parser.problems(good)
        # Ignore missing services if there are invalid files, because these files may define them.
        if not (problem.kind == "missing" and errors)
    }


def _specs(job: str, file: values.MonitFile, acted_on: frozenset[str]) -> list[ProcessSpec]:
    """Return the services in a file. Unsupported statements outside of checks, except those in ``acted_on``, are listed
    with the first service (see ``plan``).
    """
    found = []
    # ``acted_on`` contains statements of one word (``include``) and of two words (``set daemon``).
    ignored = [
        statement
        for statement in file.ignored
        if acted_on.isdisjoint((statement.first_words, statement.first_words.split()[0]))
    ]
    for number, check in enumerate(file.services):
        own = ("", check.name) if number == 0 else (check.name,)  # statements outside of checks belong to ""
        unsupported = [statement.first_words for statement in ignored if statement.service in own]
        spec = spec_of(job, check)
        if is_never_restarted(spec):
            unsupported.append(NEVER_RESTARTED)
        found.append(msgspec.structs.replace(spec, unsupported=tuple(unsupported)))
    return found


def is_never_restarted(spec: ProcessSpec) -> bool:
    """Return True for a process that has no stop program and is therefore never restarted, although the author of the
    monit file may expect a restart.
    """
    is_wanted = spec.is_process and spec.mode == "active" and spec.absence.kind == "restart"
    return is_wanted and spec.start is not None and spec.stop is None


def spec_of(job: str, check: values.Check) -> ProcessSpec:
    """Return the service that a check defines."""
    absence, cycles, change = values.Action("restart"), 1, values.ALERT  # monit's defaults
    limits: list[RestartLimit] = []
    rules: list[values.Rule] = []
    for rule in check.rules:
        match rule.test:
            case values.Missing():
                absence, cycles = rule.action, rule.rate.cycles
            case values.PidChanged():
                change = rule.action
            case values.Restarts(count, within):
                limits.append(RestartLimit(count, within, rule.action))
            case _:
                rules.append(rule)
    rules += implicit_rules(check)
    return ProcessSpec(
        name=check.name,
        job=job,
        kind=check.kind,
        pidfile=str(Path(check.pidfile)) if check.pidfile else None,
        pattern=posix_regex.compiled(check.matching) if check.matching else None,
        path=Path(check.path) if check.path else None,
        address=check.address,
        start=check.start,
        stop=check.stop,
        start_call=bpm_call(check.start.argv) if check.start else None,
        stop_call=bpm_call(check.stop.argv) if check.stop else None,
        groups=frozenset(group.lower() for group in check.groups),
        depends=check.depends,
        mode=check.mode,
        absence=absence,
        absence_cycles=cycles,
        change=change,
        limits=tuple(limits),
        rules=tuple(rules),
        passed_over=check.passed_over,
        every=check.every,
    )


def implicit_rules(check: values.Check) -> Iterator[values.Rule]:
    """Yield the rules that monit itself adds to a check of a path (``createservice`` in ``p.y``)."""
    if check.kind in ("file", "directory", "fifo"):
        yield values.Rule(values.WrongType(), values.Action("restart"))
    if check.kind in ("file", "directory", "fifo", "filesystem"):
        yield values.Rule(values.Unreadable(), values.ALERT)
    if check.kind == "filesystem" and not any(rule.test == values.Changed("fsflag") for rule in check.rules):
        yield values.Rule(values.Changed("fsflag"), values.ALERT, recovery=values.IGNORE)
