"""Compares a job's lifecycles that were recorded under both agents."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tools.comparison.plan import Plan
from tools.comparison.releases import Job


@dataclass
class Difference:
    """A difference between a job's lifecycles under the two agents.

    ``line`` is the line in the release that causes the difference, and ``allowed`` the row in docs/monit-deviations.md
    that permits it.
    """

    phase: str
    what: str
    go: str
    shim: str
    line: str = ""
    allowed: str = ""
    is_bpm: bool = False
    go_alerts: str = ""
    """Alerts that the Go agent sent in this phase."""
    go_answer: str = ""
    is_dependent: bool = False
    """Whether the service depends on another service."""
    has_no_localhost: bool = False
    """Whether the job has removed ``localhost`` from the machine's ``/etc/hosts``."""
    is_process_1: bool = False
    """Whether one of the job's scripts writes 1 to a pidfile."""
    is_survivor: bool = False
    """Whether a process outlived a stop or a restart under the Go agent but not under this agent."""
    is_started_twice: bool = False
    """Whether the Go agent handled a slow start program differently: this agent started exactly one process, whereas
    under the Go agent there was none, there were several, or another one was started in a later phase.
    """
    is_restarted_by_port: bool = False
    """Whether a port rule restarted a process under the Go agent."""
    is_restarted_by_usage: bool = False
    """Whether a rule about memory or CPU usage restarted a process under the Go agent."""
    has_failed_start: bool = False
    """Whether a start under the Go agent exceeded its timeout although the process is running now.

    This considers starts of the same service, or of any service if the difference is about the job.
    """
    runs_beside_stop_program: bool = False
    """Whether a stop program might still be running in this phase under the Go agent (monit does not wait for it). This
    is assumed if the previous phase is a stop that this agent reported at least a second later.
    """
    is_refused: bool = False
    """Whether monit, under the Go agent, refused to unmonitor a service because a stop was still in progress."""
    starts_in_turn: bool = False
    """Whether the Director might see the services while monit is still starting them one by one. The Director does not
    wait for services outside the ``vcap`` group.
    """
    is_pending: bool = False
    """Whether, under both agents, the phase ``monit restart`` ended before the restart was complete."""

    @property
    def act(self) -> str:
        """Return the name of the phase without its prefix, such as "stop" for "update: stop"."""
        return self.phase.rpartition(": ")[2]

    def __str__(self) -> str:
        return f"{self.phase}: {self.what}: {self.go or 'none'} | {self.shim or 'none'}  ({self.line})"


@dataclass
class Verdict:
    """The result for a job: a reason why it could not be compared, or the differences."""

    job: Job
    not_rendered: str = ""
    not_played: str = ""
    is_busy: bool = False
    """Whether the machine was so busy that the reason why the job did not run is unclear."""
    differences: list[Difference] = field(default_factory=list)
    listed: list[Difference] = field(default_factory=list)
    has_process: bool = True
    helped: list[str] = field(default_factory=list)
    """Names of the stand-ins that were made to keep running, and ``lenient`` if scripts continued after errors."""

    @property
    def kind(self) -> str:
        if self.not_rendered:
            return "not rendered"
        if self.not_played:
            return "busy" if self.is_busy else "needs more than a stand-in"
        if self.differences:
            return "difference"
        return "listed" if self.listed else "equal"

    def document(self) -> dict[str, Any]:
        return {
            "job": str(self.job),
            "kind": self.kind,
            "reason": self.not_rendered or self.not_played,
            "helped": self.helped,
            "guessed": list(self.job.guessed),
            "differences": [vars(one) for one in self.differences],
            "listed": [vars(one) for one in self.listed],
        }

    def __str__(self) -> str:
        reason = self.not_rendered or self.not_played
        shown = "".join(f"\n            {one}" for one in self.differences)
        return f"{self.job}: {self.kind}{f': {reason}' if reason else ''}{shown}"


OF_THE_PROGRAM: Final = "Copyright|emulated by agent-shim|message$|not acted on$"
MAX_NAMES: Final = 4
OF_BPM: Final = frozenset(("bpm", "runc", "tini"))
BPM_USAGE_AND_ERRORS: Final = re.compile(r"\nUsage:.*(\nError:)|(?<=parse job configuration): .*", re.DOTALL)
"""Matches bpm's usage messages, and its error messages for a configuration that cannot be parsed. docs/bpm.md allows
these to differ.
"""
FIGURES: Final = ("cpu", "memory usage", "swap usage", "permission", "uid", "gid", "size", "timestamp")
"""Lines in the output of ``monit status`` whose values are allowed to differ for every job, according to
docs/monit-deviations.md.
"""
UNSTEADY_STATES: Final = 4
"""A process counts as unsteady after this many state changes without a request."""

DEATHS: Final = ("death", "port closed", "unmonitor")
"""Phases in which processes are killed."""
HOOKS: Final = re.compile(r"/bin/(pre-start|post-start|post-deploy|pre-stop|drain|post-stop|run)((?: .*)?)$")
BUSY_WAIT: Final = 2.0
"""Ratio of the time that a run has waited for a CPU to the CPU time that it has used. Above this ratio, the machine
counts as too busy.
"""
VOLATILE: Final = re.compile(
    r"_|PWD|OLDPWD|SHLVL|AGENT_SHIM_\w+|BPM_STAND_IN|MONIT_DATE|MONIT_DESCRIPTION|MONIT_PROCESS_\w+"
)
"""Variables that shells or stand-ins set, and monit's variables, which change from cycle to cycle."""
ROUGHLY: Final[list[tuple[re.Pattern[str], float, float]]] = [
    (re.compile(r"uptime|load"), math.inf, 0),
    (re.compile(r"\bcpu\b"), 100, 0),
    (re.compile(r"percent"), 15, 0),
    (re.compile(r"mem\.kb$"), 8192, 0.5),
]
"""Patterns for the paths of values that are never exactly equal, each with an absolute and a relative difference. The
values in two simultaneous runs are allowed to differ by the larger of these.
"""

Phases = dict[str, dict[str, Any]]

AFTER_STOPS: Final = (
    *("monit restart", "port closed", "port open again", "unmonitor", "monitor again", "agent restarted"),
    *("drain", "stop", "post-stop", "apply"),
    *("pre-start", "start", "start after stop", "slow start", "pre-stop"),
)
"""Phases in which a process that outlived a stop or a restart may still be running."""
AFTER_STOP: Final = ("post-stop", "apply", "pre-start")
"""Phases between a stop and the next start."""
LAST: Final = ("pre-stop", "drain", "stop", "post-stop")
"""Phases that follow a slow start."""
UNTIL_REST: Final = ("start", "post-start", "post-deploy", "rest")
STARTS: Final = (*UNTIL_REST, "start after stop", "slow start")

ALLOWED: Final[list[tuple[str, Callable[[Difference], bool]]]] = [
    (
        "all services share one cycle",
        lambda one: one.act in STARTS and "Does not exist" in one.go and not one.shim,
    ),
    (
        "a changed parent is reported",
        lambda one: "PPID changed" in one.go or ("PPID changed" in one.go_alerts and "failing" in one.what),
    ),
    (
        "a process whose pidfile is emptied",
        lambda one: (
            (
                (one.act == "empty pidfile" or (one.act not in DEATHS and "Does not exist" in one.go_alerts))
                and one.what.endswith("SIGTERM")
                and not one.go
            )
            or (one.act == "stop" and one.what == "processes left" and not one.shim)
        ),
    ),
    (
        "a service that runs under bpm keeps failing once",
        lambda one: one.is_bpm and one.act in ("empty pidfile", "pidfile filled again"),
    ),
    (
        "a rule's count survives a restart",
        lambda one: (
            (
                one.act == "port closed"
                and "Connection failed - restart" in one.go_alerts
                and (one.what.endswith(" lives") or "state" in one.what or one.what.startswith("process of "))
            )
            or (  # The last restart might not be complete until the next phase.
                one.act == "port open again"
                and one.is_restarted_by_port
                and one.what.endswith((" lives", " is the former one"))
            )
            or (  # Each new process exceeds the limit again, but only this agent reports that every time.
                one.act == "usage"
                and one.is_restarted_by_usage
                and (
                    one.what.endswith(" lives")
                    or "state" in one.what
                    or one.what.startswith("process of ")
                    or (one.what.endswith("Resource limit matched - restart") and bool(one.go and one.shim))
                )
            )
            or (
                one.act == "usage ended"
                and one.is_restarted_by_usage
                and (
                    one.what.endswith((" lives", " is the former one"))
                    or (one.what.endswith((" SIGTERM", "Resource limit matched - restart")) and not one.go)
                )
            )
        ),
    ),
    ("alerts are mailed to `localhost`", lambda one: one.has_no_localhost),
    (
        "pid 1 in any pidfile",
        lambda one: one.is_process_1 and one.what.startswith(("monit status Process", "state processes")),
    ),
    (
        "when a service's main process has died",
        lambda one: one.act in DEATHS and one.what.endswith("SIGTERM") and not one.go,
    ),
    (
        "checks, starts and stops wait for each other",
        lambda one: (
            (one.act in ("death", "empty pidfile") and one.what.startswith("alert") and one.is_dependent and not one.go)
            or (one.act in ("agent restarted", "stop") and one.is_pending)
            or (one.act in ("unmonitor", "monitor again") and one.is_refused)
            or (one.phase in UNTIL_REST and one.what.startswith("process of ") and one.starts_in_turn)
        ),
    ),
    (
        "a stop is complete once the pidfile is gone",
        lambda one: (
            (one.is_survivor and one.act in AFTER_STOPS)
            # bpm has not removed the container yet.
            or ((one.act, one.what) == ("stop", "bpm list") and "failed" in one.go)
        ),
    ),
    (
        "a stop does not run the stop program for a dead process",
        lambda one: one.act == "stop" and "/sys/run/bpm/" in one.what and one.go == "left",
    ),
    (
        "a restart, or a start after a stop, runs the start program while the stop program",
        lambda one: (
            (one.act == "monit restart" and "Does not exist" in one.go and not one.shim)
            or (
                one.runs_beside_stop_program
                and "Does not exist - restart" in one.go_alerts
                and one.what.endswith(("SIGTERM", " lives") if one.go > one.shim else ())
            )
        ),
    ),
    (
        "programs inherit monit's or the Go agent's working directory",
        lambda one: one.what.endswith(": directory") and one.shim == "/var/vcap/empty",
    ),
    ("the soft limit for core files", lambda one: one.what.endswith(": limit core") and one.shim.startswith("[1, ")),
    (
        "a start program that exceeds its timeout",
        lambda one: (
            one.is_started_twice
            and one.phase in ("slow start", *LAST)
            and not ("Execution failed" in one.go and not one.shim)  # Each agent reports only the first failure.
        ),
    ),
    (
        "`Execution failed` remains set until",
        lambda one: (
            one.has_failed_start
            and (one.go, one.shim) in (("failing", "running"), ("True", "False"))
            and one.what.startswith(("job state", "state of ", "is failing meanwhile"))
        ),
    ),
    (
        "`monit monitor` reports `Does not exist`",
        lambda one: one.phase == "monitor again" and "Does not exist" in one.go and not one.shim,
    ),
    ("a stop is refused while a start is pending", lambda one: one.act == "stop" and "errored" in one.go_answer),
]
"""The beginning of each row in docs/monit-deviations.md, with a function that recognizes the differences it allows."""


def judge(made: Plan, go: dict[str, Any], shim: dict[str, Any]) -> Verdict:
    """Compare the lifecycles under both agents phase by phase.

    A job that runs under neither agent is not compared, because its stand-ins are evidently insufficient.
    """
    verdict = Verdict(made.job, has_process=bool(made.services))
    if go["error"] or shim["error"]:
        verdict.not_played = f"Go agent: {go['error']}; this agent: {shim['error']}"[:300]
    lives = [{phase["name"]: phase for phase in life["phases"]} for life in (go, shim)]
    verdict.not_played = verdict.not_played or _obstacle(*lives)
    # A busy machine explains a late answer only if the run itself had to wait for a CPU.
    slowed = [played for life, played in zip((go, shim), lives, strict=True) if life.get("waited", 0) > BUSY_WAIT]
    late = next((phase for played in slowed for phase in _late_phases(played)), "")
    if late or (slowed and (go["error"] or shim["error"])):
        verdict.is_busy = True
        verdict.not_played = verdict.not_played or f"no answer in time: {late}"
    for one in [] if verdict.not_played else _differences(*lives):
        one.line = _line(made.job, one)
        one.is_bpm = "/sys/run/bpm/" in made.job.monit
        if one.is_bpm and one.phase == "death" and one.what.endswith("SIGTERM"):
            continue  # bpm's init process forwards the signal, but the stand-in for bpm has no init process.
        seen = lives[0].get(one.phase, {})
        words = one.what.split()
        one.is_dependent = any(
            service.name in words and re.search(r"\bdepends\s+on\b", service.text) for service in made.services
        )
        said = "".join(lives[0].get("rest", {}).get("texts", {}).values())
        one.has_no_localhost = "did not resolve 'localhost'" in said
        one.is_process_1 = any(re.search(r"echo [\"']?1[\"']? *>", text) for text in made.job.files.values())
        restarts = [life["monit restart"]["job_states"][-1:] for life in lives if "monit restart" in life]
        one.is_survivor = any(leaves(lives[0]) and not leaves(lives[1]) for leaves in (_is_left, _outlives_a_restart))
        one.is_started_twice = _begun(lives[1], "slow start") == 1 and (
            _begun(lives[0], "slow start") != 1 or _begun(lives[0], *LAST) > 0 or _is_script_still_running(lives[0])
        )
        one.is_pending = restarts == [["failing"]] * len(lives)
        closed = lives[0].get("port closed", {}).get("alerts", [])
        one.is_restarted_by_port = any("Connection failed - restart" in alert for alert in closed)
        used = lives[0].get("usage", {}).get("alerts", [])
        one.is_restarted_by_usage = any("Resource limit matched - restart" in alert for alert in used)
        one.is_refused = "Other action already in progress" in lives[0].get("unmonitor", {}).get("value", "")
        one.runs_beside_stop_program = one.act in STARTS and _is_shorter_stop(lives[0], lives[1], one.phase)
        one.starts_in_turn = all(_starts_in_turn(life) for life in lives)
        one.has_failed_start = _has_failed_start(lives[0], one)
        one.go_alerts, one.go_answer = " ".join(seen.get("alerts", [])), seen.get("value", "")
        one.allowed = next((title for title, is_one in ALLOWED if is_one(one)), "")
        (verdict.listed if one.allowed else verdict.differences).append(one)
    return verdict


def _is_left(life: Phases) -> bool:
    """Return True if a process whose pid is in a pidfile is still running at the end of a stop."""
    stops = [phase for name, phase in life.items() if name.rpartition(": ")[2] == "stop"]
    return any(lives for stop in stops for lives in stop["services"].values())


def _is_shorter_stop(go: Phases, shim: Phases, name: str) -> bool:
    """Return True if the previous phase was a stop, and monit was over a second faster than this agent."""
    names = list(go)
    before = names[max(names.index(name) - 1, 0)] if name in names else ""
    took = [life.get(before, {}).get("seconds", 0.0) for life in (go, shim)]
    return before.rpartition(": ")[2] == "stop" and took[0] < took[1] - 1


def _has_failed_start(life: Phases, one: Difference) -> bool:
    """Return True if a start of the service has failed since the last stop, but the service's process is running now.

    If the difference is about the job's state, a failed start of any service counts.
    """
    names = list(life)
    until = names[: names.index(one.phase) + 1] if one.phase in names else []
    last_stop = max((at for at, name in enumerate(until[:-1]) if name.rpartition(": ")[2] == "stop"), default=0)
    alerts = [alert for name in until[last_stop:] for alert in life[name]["alerts"]]
    about = one.what.removeprefix("state of ")
    lives = life[one.phase]["services"] if until else {}
    return any(
        lives.get(name) and f"{name} - Execution failed - alert" in alerts
        for name in ([about] if about in lives else lives)
    )


def _starts_in_turn(life: Phases) -> bool:
    """Return True if several services outside the vcap group each have a process while the job is at rest.

    The Director does not wait until such services have started, because the job's state covers only that group.
    """
    has_process = life.get("rest", {}).get("services", {}).values()
    return len(has_process) > 1 and all(has_process) and not life["start"]["states"]


def _begun(life: Phases, *names: str) -> int:
    """Return how often the most frequently started program was started in the phases ``names``."""
    seen = [program for name in names for _, event, program in life.get(name, {}).get("events", []) if event == "lives"]
    return max(Counter(seen).values(), default=0)


def _is_script_still_running(life: Phases) -> bool:
    return "told" in life.get("stop", {}).get("texts", {}).get("processes", "").split()


def _late_phases(life: Phases) -> Iterator[str]:
    """Yield the phases in which the agent did not answer. Also yield the start phase if a process was still starting
    when the phase ended.
    """
    for name, phase in life.items():
        is_starting = name == "start" and any(known[-1] == "starting" for known in phase["states"].values())
        if is_starting or re.match("error: (no answer|Timed out sending)", phase["value"]):
            yield name


def _outlives_a_restart(life: Phases) -> bool:
    """Return True if ``monit restart`` started a process although no process had been signalled."""
    events = {event for _, event, _ in life.get("monit restart", {}).get("events", [])}
    return "lives" in events and not any(event.startswith("SIG") for event in events)


def _obstacle(go: Phases, shim: Phases) -> str:
    """Return the reason why a job ran in neither environment, or "" if it ran in at least one."""
    failed = [life["pre-start"] for life in (go, shim) if life.get("pre-start", {}).get("value", "")[:5] == "error"]
    if len(failed) == 2:
        return f"pre-start: {(failed[0]['texts'].get('log') or failed[0]['value'])[-160:]}".replace("\n", " / ")
    if all("start" in life and life["start"]["running_after"] < 0 for life in (go, shim)):
        states = ", ".join(f"{name} {states[-1]}" for name, states in go["start"]["states"].items())
        logs = go.get("rest", {}).get("texts", {}).get("logs", "")[-200:]
        return f"does not run in either environment: {states}: {logs}".replace("\n", " / ")
    # Also check the processes, because the job's state does not include services outside the vcap group.
    if all("rest" in life and not _is_up(life["rest"]) for life in (go, shim)):
        logs = go["rest"]["texts"].get("logs", "")[-200:]
        return f"does not stay up in either environment: {logs}".replace("\n", " / ")
    return ""


def _is_up(rest: dict[str, Any]) -> bool:
    return rest["job_states"][-1:] == ["running"] and (not rest["services"] or any(rest["services"].values()))


def tools(life: dict[str, Any]) -> list[str]:
    """Return the stand-ins that start programs ran as short-lived tools, in the order in which they ran."""
    events = [one for phase in life["phases"] if phase["name"] in ("start", "rest") for one in phase["events"]]
    return [program for _, event, program in events if event == "tool"]


def lacks_a_process(lives: list[dict[str, Any]]) -> bool:
    """Return True if a service had no process under one of the agents while the job was at rest."""
    resting = [phase for life in lives for phase in life["phases"] if phase["name"] == "rest"]
    return not all(has_process for phase in resting for has_process in phase["services"].values())


def is_unsteady(lives: list[dict[str, Any]]) -> bool:
    """Return True if a process exited repeatedly although nothing was requested.

    In that case, its stand-in has probably exited like a tool although it should have kept running.
    """
    resting = [phase for life in lives for phase in life["phases"] if phase["name"] == "rest"]
    return any(len(states) >= UNSTEADY_STATES for phase in resting for states in phase["states"].values())


def _differences(go: Phases, shim: Phases) -> Iterator[Difference]:
    for name in list(go) + [name for name in shim if name not in go]:
        if name not in go or name not in shim:
            yield Difference(name, "phase", "played" if name in go else "", "played" if name in shim else "")
            continue
        seen = [dict(_facts(life[name])) for life in (go, shim)]
        for what in sorted({*seen[0], *seen[1]}):
            values = [one.get(what, "") for one in seen]
            is_beside = (what.endswith(" tool") and _runs_beside(go, shim, name, what)) or (
                what.endswith(" lives") and _starts_in_adjacent_phase(go, shim, name, what)
            )
            if values[0] != values[1] and not is_beside:
                yield Difference(name, what, values[0], values[1])
    yield from _inherited(go, shim)
    for kind in ("state", "heartbeat"):
        yield from _values(go, shim, kind)
        shapes = [_shapes(life, kind) for life in (go, shim)]
        for member in sorted(shapes[0] ^ shapes[1]) if all(shapes) else ():
            go_has, shim_has = ("there" if member in shape else "" for shape in shapes)
            yield Difference("rest", f"{kind} {member}", go_has, shim_has)


def _inherited(go: Phases, shim: Phases) -> Iterator[Difference]:
    """Yield differences in what programs inherit. Programs that did not run under both agents are ignored."""
    lives = [_contexts(life) for life in (go, shim)]
    for program in sorted(set(lives[0]) & set(lives[1])):
        facts = [_facts_of(life[program]) for life in lives]
        for what in sorted({*facts[0], *facts[1]}):
            values = [one.get(what, "") for one in facts]
            if values[0] != values[1]:
                yield Difference("life", f"{program}: {what}", values[0], values[1])


def _contexts(life: Phases) -> dict[str, list[dict[str, Any]]]:
    """Collect the contexts that each program inherited in all phases of a lifecycle."""
    found: dict[str, list[dict[str, Any]]] = {}
    for phase in life.values():
        for program, contexts in phase.get("contexts", {}).items():
            found.setdefault(program, []).extend(contexts)
    return found


def _facts_of(contexts: list[dict[str, Any]]) -> dict[str, str]:
    """Return the value of each property, such as the user or a limit, that a program inherited.

    Values that differ between the program's ``contexts`` are joined by commas.
    """
    values: dict[str, set[str]] = {}
    for context in contexts:
        for what in ("umask", "user", "directory"):
            values.setdefault(what, set()).add(re.sub(r"/[0-9a-f]{40,}", "/DIGEST", str(context[what])))
        for name, limit in context["limits"].items():
            values.setdefault(f"limit {name}", set()).add(str(limit))
        for name, value in context["environment"].items():
            if not VOLATILE.fullmatch(name):
                values.setdefault(f"environment {name}", set()).add(re.sub(r"\d{3,}", "N", value))
    return {what: ", ".join(sorted(seen)) or "empty" for what, seen in values.items()}


def _values(go: Phases, shim: Phases, kind: str) -> Iterator[Difference]:
    """Yield the values that differ between the two agents.

    If ``kind`` is ``state``, compare the states at rest and after the update. If it is ``heartbeat``, compare the last
    heartbeats.
    """
    for name in ("rest", "update: start") if kind == "state" else ("life",):
        seen = [_last_heartbeat(life) if name == "life" else _state(life, name) for life in (go, shim)]
        for path in sorted(set(seen[0]) & set(seen[1])):
            values = [one[path] for one in seen]
            # Skip states, because they are compared in each phase.
            is_state = re.fullmatch(r"job_state|number_of_processes|processes\[.*\]\.state", path)
            is_new = name == "update: start" and path.endswith(".mem.kb")  # A new process may still be growing.
            if not is_state and not is_new and not _are_alike(path, *values):
                go_has, shim_has = (str(value) or "empty" for value in values)
                yield Difference(name, f"value in {kind} {path}", go_has, shim_has)


def _state(life: Phases, name: str) -> dict[str, Any]:
    return dict(life.get(name, {}).get("values", {}).get("state", {}))


def _last_heartbeat(life: Phases) -> dict[str, Any]:
    """Return the values in the last heartbeat after the apply."""
    found = [phase.get("values", {}).get("heartbeat") for name, phase in life.items() if name != "apply"]
    return dict(next((one for one in reversed(found) if one), {}))


def _are_alike(path: str, go: Any, shim: Any) -> bool:
    numbers = [_number(value) for value in (go, shim)]
    if None in numbers or isinstance(go, str) != isinstance(shim, str):
        return bool(go == shim)
    one, other = (number or 0.0 for number in numbers)
    for pattern, absolute, relative in ROUGHLY:
        if pattern.search(path):
            return one >= 0 and other >= 0 and abs(one - other) <= max(absolute, relative * max(one, other))
    return bool(go == shim)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(str(value))
    except ValueError:
        return None


def _runs_beside(go: Phases, shim: Phases, name: str, what: str) -> bool:
    """Return True if both runs used a tool in phase ``name`` or in an adjacent phase.

    Scripts may continue after the end of their phase. A stop program may even continue until the next start, because
    monit does not wait for it.
    """
    for life in (go, shim):
        names = list(life)
        first = at = names.index(name)
        while first > 0 and (first == at or names[first].rpartition(": ")[2] in AFTER_STOP):
            first -= 1
        around = [life[one] for one in names[first : at + 2]]
        if what not in {f"{program} {event}" for phase in around for _, event, program in phase["events"]}:
            return False
    return True


def _starts_in_adjacent_phase(go: Phases, shim: Phases, name: str, what: str) -> bool:
    """Return True if both runs started a program equally often in phase ``name`` and an adjacent phase, counted
    together.

    The runs then differ only in when a process reported its start. The first of the two phases must be a start phase,
    because a start program may wait before it runs the service's program. Any other pair of phases is considered only
    if no process was replaced in either phase.
    """
    program = what.removesuffix(" lives")

    def began(life: Phases, *names: str) -> int:
        events = [event for one in names for event in life[one]["events"]]
        return sum((event, said_by) == ("lives", program) for _, event, said_by in events)

    names = [one for one in go if one in shim]
    at = names.index(name)
    pairs = [
        pair
        for pair in (names[max(at - 1, 0) : at + 1], names[at : at + 2])
        if pair[0].rpartition(": ")[2] in STARTS
        or all(life[one]["same"] and all(life[one]["same"].values()) for life in (go, shim) for one in pair)
    ]
    return any(began(go, *pair) == began(shim, *pair) for pair in pairs)


def _shapes(life: Phases, kind: str) -> set[str]:
    """Return the path and type of each member in the recorded documents of a kind (``state`` or ``heartbeat``).

    Documents that were recorded before the job was running are ignored.
    """
    later = [phase for name, phase in life.items() if name not in ("apply", "pre-start", "start", "post-start")]
    members = {member for phase in later for member in phase.get("shapes", {}).get(kind, "").split(", ") if member}
    return {member for member in members if not re.search(r"vitals\.disk\.persistent|: NoneType", member)}


def _facts(phase: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each item that is compared in a phase."""
    name = phase["name"].rpartition(": ")[2]
    # Only this agent adds the reason for the failure, so remove it.
    answer = re.sub(r"(Failed Jobs: [\w, -]+\.).*", r"\1", phase["value"], flags=re.DOTALL)
    yield "answer", re.sub(r"[0-9a-f-]{36}|\d+\.\d+", "…", answer)[:200]
    yield "job state", "".join(phase["job_states"][-1:])
    if name in ("rest", "port closed", "port open again", "agent restarted", "usage"):
        yield "is failing meanwhile", str("failing" in phase["job_states"][1:])
    for process, states in phase["states"].items():
        if _is_listed(process, phase):
            yield f"state of {process}", states[-1]
    for service, lives in phase["services"].items():
        yield f"process of {service}", "lives" if lives else "is dead"
        yield f"process of {service} is the former one", str(phase["same"][service]) if lives else ""
    if name not in (
        "pre-start",
        "start",
        "rest",
        "monit restart",
        "stop",
    ):  # Ignore signals in these phases, because many ctl scripts send SIGKILL right after SIGTERM.
        for (event, program), count in Counter((event, program) for _, event, program in phase["events"]).items():
            if (name, event) != ("post-start", "lives"):  # A process may report late that it has started.
                yield f"{program} {event}", str(count) if event == "lives" else "yes"
    yield from _alerts_and_scripts(phase)
    for command, said in phase["texts"].items():
        yield from _comparable_output(command, said)
    if "processes" in phase["texts"]:
        left = set(phase["texts"]["processes"].split()) - OF_BPM
        yield "processes left", " ".join(sorted(left))
    for file in phase["files"]:
        if file.startswith(("data/jobs/bpm/", "data/sys/run/bpm-runc/")) or (
            " " in file and file.startswith("data/sys/log/") and re.search(r"(pre-|post-|drain).*\.log", file)
        ):
            continue
        yield f"file {file}", "left"


def _is_listed(process: str, phase: dict[str, Any]) -> bool:
    """Return True if the state recorded at the end of ``phase`` lists ``process``, or if no state was recorded.

    A process that was removed during the phase is not in that state.
    """
    values = phase.get("values", {}).get("state")
    return values is None or any(path.startswith(f"processes[{process}]") for path in values)


def _alerts_and_scripts(phase: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the number of alerts of each kind, and the arguments of each script that the Director has run."""
    for alert, number in sorted(Counter(phase["alerts"]).items()):
        yield f"alert {alert}", alert if number == 1 else f"{alert} ({number} times)"
    runs = Counter((found[1], found[2]) for script in phase.get("scripts", []) if (found := HOOKS.search(script)))
    for (script, arguments), number in runs.items():
        yield f"script {script}", f"{number} x {arguments}".strip()


def _comparable_output(command: str, said: str) -> Iterator[tuple[str, str]]:
    """Yield the comparable parts of a command's output.

    For monit, these are the exit code, the state of each service, and the titles of all other lines without their
    values. For bpm, it is the whole output without numbers.
    """
    if command.startswith("bpm "):
        yield command, re.sub(BPM_USAGE_AND_ERRORS, r"\1", re.sub(r"\d+", "N", re.sub(r"[ \t]+", " ", said)))
    if not command.startswith("monit "):
        return
    code, _, text = said.partition("\n")
    yield f"code of {command}", code
    about = ""
    for line in text.splitlines():
        title, _, value = (word.strip() for word in re.sub(r" {2,}", "\0", line.strip()).partition("\0"))
        if service := re.match(r"(\w+) '([^']*)'", line):
            about = f" {service[1]} {re.sub('^system_.*', 'system', service[2])}"
            yield f"{command}{about}", value or "said"
        elif (
            title
            and not re.match(OF_THE_PROGRAM, title)
            and not (about.startswith((" System", " File", " Directory", " Fifo", " Filesystem")) and title in FIGURES)
        ):
            shown = value if title in ("status", "monitoring status") else "said"
            yield f"{command}{about}: {re.sub(r'[0-9]+', 'N', title)}", shown


def _line(job: Job, one: Difference) -> str:
    """Return the path of the script that probably causes a difference, or a line of the monit file (``PATH:LINE``).

    A line is returned only if the phase has no script. It is usually the first line that contains a word from the
    difference's description.
    """
    text = job.sources.get(f"jobs/{job.name}/monit", "")
    lines = text.splitlines()
    words = one.what.split()
    script = next((path for path in job.sources if path.split("/")[-1].split(".")[0] == one.phase), "")
    if script:
        return script
    found = [
        number for number, line in enumerate(lines, 1) if any(len(word) > 3 and word in line for word in words[1:])
    ]
    if "port" in one.phase:
        found = [number for number, line in enumerate(lines, 1) if re.search(r"failed|unixsocket", line)] or found
    return f"jobs/{job.name}/monit:{found[0] if found else 1}"


def table(verdicts: list[Verdict]) -> str:
    """Return a Markdown table of all differences, followed by the number of jobs with each result."""
    rows = ["", "| job | phase | what | Go agent and monit | this agent | from |", "|---|---|---|---|---|---|"]
    for verdict in sorted(verdicts, key=str):
        rows += [
            f"| {verdict.job} | {one.phase} | {one.what} | {one.go or '-'} | {one.shim or '-'} | {one.line} |"
            for one in verdict.differences
        ]
    counts = Counter(verdict.kind for verdict in verdicts)
    rows += ["", ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))]
    return "\n".join(rows)


def reasons(verdicts: list[Verdict]) -> str:
    """Return a Markdown table of the rows in docs/monit-deviations.md, with the jobs and releases to which each row
    applies.
    """
    rows = ["", "| row of the deviations | jobs | releases |", "|---|---|---|"]
    titles = dict.fromkeys(title for title, _ in ALLOWED)
    for title in titles:
        touched = [verdict for verdict in verdicts if any(one.allowed == title for one in verdict.listed)]
        names = sorted({verdict.job.release.rpartition("/")[2] for verdict in touched})
        shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
        rows.append(f"| {title} … | {len(touched)} | {shown} |")
    return "\n".join(rows)


def counts(verdicts: list[Verdict]) -> str:
    """Return a paragraph that says how many of each release's jobs could be rendered."""
    played = Counter(verdict.job.release.rpartition("/")[2] for verdict in verdicts if not verdict.not_rendered)
    return "\n" + ", ".join(f"{name} {count}" for name, count in sorted(played.items())) + "."
