"""``python -m tools.comparison.life WORLD PLAN RESULT``: run one job's lifecycle under one of the two agents.

The lifecycle runs in new namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from agent_shim.demo.director import Director, HealthMonitor, RpcRemoteError, RpcTimeoutError
from agent_shim.demo.pki import HEALTH_MONITOR
from tests.support import monitrc
from tests.support.broker import NatsServer
from tools.comparison import plan as plans
from tools.comparison.releases import ADDRESS

AGENT: Final = "instance"
VCAP: Final = Path("/var/vcap")
SCRATCH: Final = Path("/mnt")
BPM: Final = SCRATCH / "bpm"
"""Directory with the real bpm package's programs. If it is missing, the stand-in tools/comparison/bpm.py is
used.
"""
BROKEN: Final = SCRATCH / "broken"
"""Directory with an agent that is broken on purpose."""
BLOBS: Final = VCAP / "blobs"
SETTINGS: Final = VCAP / "bosh/warden-cpi-agent-env.json"
OBSERVER: Final = 59999
LOOK_S: Final = 0.7
LAST_LOOK_S: Final = 20
"""Time limit in seconds for the get_state request at the end of a phase. Its answer is compared."""
SCRIPT_LIMIT_S: Final = 240.0
START_LIMIT_S: Final = 20
START_LIMIT_CYCLES: Final = 8
MONIT_TRIES: Final = 10
USAGE_LIMIT_S: Final = 30
FILES: Final = 1024
"""Soft limit on open files that both agents inherit."""

ETC: Final = (
    *(
        "rsyslog.d",
        "samba",
        "logrotate.d",
        "cron.d",
        "cron.daily",
        "cron.hourly",
        "profile.d",
        "security/limits.d",
        "sysctl.d",
    ),
    *("init.d", "init", "sv", "service", "audit/rules.d", "monit", "nginx", "default"),
)
TREE: Final = (
    *("blobs", "bosh", "data/sys/run", "data/sys/log", "data/packages", "data/jobs", "data/tmp", "store", "instance"),
    *("jobs", "packages", "monit"),
)
"""Directories that a stemcell has below ``/var/vcap``. The names in ``ETC`` are directories below ``/etc``."""
COMMANDS: Final = ("monit summary", "monit status", "monit stop none", "monit unmonitor", "monit nonsense", "monit -V")
"""Commands that an operator might run. Their exit codes and outputs are compared."""
BPM_COMMANDS: Final = (
    *("bpm list", "bpm pid {job} -p {process}", "bpm pid {job} -p none", "bpm pid none", "bpm start none"),
    *("bpm stop none", "bpm run none -p {process}", "bpm logs none", "bpm pid", "bpm nonsense"),
)
"""Commands for bpm, if the job runs under the real bpm. The first two run again after the stop."""
RELOADS: Final = "Waiting for monit to reload"
ENVIRONMENT: Final = {"PATH": f"{VCAP}/bosh/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""Environment variables that an agent gets from its service manager."""
NEXT: Final = dict.fromkeys(("BOSH_VM_NEXT_STATE", "BOSH_INSTANCE_NEXT_STATE", "BOSH_DEPLOYMENT_NEXT_STATE"), "keep")
STAND_IN: Final = VCAP / "packages/stand_in"


@dataclass
class Phase:
    """Observations between one action and the next. Times are seconds since the action."""

    name: str
    value: str = ""
    """The answer to the action, or the error."""
    seconds: float = 0.0
    job_states: list[str] = field(default_factory=list)
    """The states that the job passed through, in order. A new entry is added only when the state changes."""
    states: dict[str, list[str]] = field(default_factory=dict)
    """The states that each process passed through, like ``job_states``."""
    running_after: float = -1.0
    events: list[list[Any]] = field(default_factory=list)
    """``[seconds, event, program]`` reported by stand-ins."""
    alerts: list[str] = field(default_factory=list)
    heartbeats: list[str] = field(default_factory=list)
    services: dict[str, bool] = field(default_factory=dict)
    """For each service, whether the process in its pidfile is running at the end of the phase."""
    same: dict[str, bool] = field(default_factory=dict)
    """For each service, whether its process is the same as in the previous phase."""
    texts: dict[str, str] = field(default_factory=dict)
    """Exit codes and outputs of commands."""
    files: list[str] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    """Paths of all members in the last state and the last heartbeat, with their types."""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of the members in ``shapes``."""
    scripts: list[str] = field(default_factory=list)
    """The job's scripts that ran, with their arguments."""
    contexts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """For each program, the different contexts that its processes inherited."""


class ComparedAgent:
    """One agent's environment. ``cycle`` is the interval between monit's checks in seconds."""

    def __init__(self, plan: dict[str, Any], cycle: int) -> None:
        self.plan, self.cycle = plan, cycle
        self.agent: subprocess.Popen[bytes] | None = None

    def settle_in(self) -> None:
        """Set up the parts of a stemcell that both agents need."""
        settle_in(self.plan["system"])

    def prepare(self) -> None:
        """Create the files that only this agent expects from a stemcell."""

    def configure(self, settings: dict[str, Any]) -> None:
        """Write the agent's configuration and the settings that a CPI would write."""
        config = {
            "Platform": {"Linux": {"UseDefaultTmpDir": True, "SkipDiskSetup": True}},
            "Infrastructure": {"Settings": {"Sources": [{"Type": "File", "SettingsPath": str(SETTINGS)}]}},
            "AgentShim": {"http": "off"},
        }
        (VCAP / "bosh/agent.json").write_text(json.dumps(config))
        SETTINGS.write_text(json.dumps(settings))

    def start(self) -> None:
        """Start the agent."""
        raise NotImplementedError

    def log(self) -> Any:
        return (SCRATCH / "agent.log").open("ab")

    def applied(self) -> None:
        """Complete an ``apply`` with the steps that the Go agent's test platform leaves out."""

    def restart(self) -> None:
        """Kill the agent and start it again, as its service manager would."""
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()
        self.start()


class GoWorld(ComparedAgent):
    """The Go agent with monit.

    Another process restarts monit whenever it exits, as runit does, and kills it when the agent waits for a reload.
    """

    def prepare(self) -> None:
        (VCAP / "bosh/bin").mkdir(parents=True)
        (VCAP / "bosh/etc").mkdir()
        (VCAP / "monit/job").mkdir(parents=True)
        (VCAP / "monit/empty.monitrc").touch()
        rc = VCAP / "bosh/etc/monitrc"
        rc.write_text(monitrc.control(cycle=self.cycle, run=Path("/run"), is_whole=True) + monitrc.alerts())
        rc.chmod(0o600)
        wrapper = VCAP / "bosh/bin/monit"
        wrapper.write_text(f'#!/bin/sh\nexec {SCRATCH}/monit -c {rc} "$@"\n')
        wrapper.chmod(0o755)
        keeper, service = [sys.executable, "-m", f"{__package__}.keeper"], Path("/etc/sv/monit")
        service.mkdir()
        subprocess.Popen(keeper, stdout=self.log(), stderr=subprocess.STDOUT, start_new_session=True, cwd=service)

    def start(self) -> None:
        options = ["-P", "dummy", "-M", "monit", "-C", str(VCAP / "bosh/agent.json"), "-b", str(VCAP)]
        go = str(SCRATCH / "bosh-agent")
        environment = ENVIRONMENT | {"TMPDIR": f"{VCAP}/data/tmp"}  # A stemcell sets TMPDIR for the agent.
        self.agent = subprocess.Popen(
            [go, *options], env=environment, stdout=self.log(), stderr=subprocess.STDOUT, cwd=VCAP / "bosh"
        )

    def applied(self) -> None:
        """Change the owner of the job's files to ``root:vcap``.

        The Go agent does so too (``applier/jobs``, ``applier/models``), but not on its test platform.
        """
        job = self.plan["job"]
        for place in (VCAP / "data/jobs", *(VCAP / f"data{above}/{job}" for above in ("/sys/run", "/sys/log", ""))):
            subprocess.run(["chown", "-R", "root:vcap", str(place)], check=False)
        # Install the real bpm again after each apply, because an apply removes all packages that are not in the spec.
        if BPM.exists() and not (VCAP / "packages/bpm/bin/bpm").exists():
            shutil.copytree(BPM, VCAP / "data/packages/bpm/bin", dirs_exist_ok=True)
            (VCAP / "packages/bpm").unlink(missing_ok=True)
            (VCAP / "packages/bpm").symlink_to(VCAP / "data/packages/bpm")


class ShimWorld(ComparedAgent):
    def prepare(self) -> None:
        (VCAP / "bosh/bin").mkdir(parents=True)
        wrapper = VCAP / "bosh/bin/monit"
        command = "from agent_shim.cli.monit import main; import sys; sys.argv[0] = 'monit'; sys.exit(main())"
        wrapper.write_text(
            f'#!/bin/sh\nPYTHONPATH={os.environ["PYTHONPATH"]} exec {sys.executable} -c "{command}" "$@"\n'
        )
        wrapper.chmod(0o755)

    def start(self) -> None:
        paths = [str(BROKEN), os.environ["PYTHONPATH"]]
        code = f"import sys; sys.path[:0] = {paths}; from {__package__} import shim; shim.main()"
        options = [str(self.cycle), "run", "-C", str(VCAP / "bosh/agent.json")]
        self.agent = subprocess.Popen(
            [sys.executable, "-c", code, *options],
            env=ENVIRONMENT,
            stdout=self.log(),
            stderr=subprocess.STDOUT,
            cwd="/",
        )


class ImageWorld(ComparedAgent):
    """A running container of this project's image. Its init has already started the agent, which waits for settings.

    No program in the image is replaced with a stand-in, and the monit cycle has the usual length of ten seconds.
    """

    def settle_in(self) -> None:
        BLOBS.mkdir()
        add_network()

    def configure(self, settings: dict[str, Any]) -> None:
        SETTINGS.write_text(json.dumps(settings))

    def start(self) -> None:
        """Do nothing, because the agent starts as soon as there are settings."""

    def restart(self) -> None:
        subprocess.run(["pkill", "-KILL", "--full", "bin/bosh-agent"], check=True)


WORLDS: Final[dict[str, type[ComparedAgent]]] = {"go": GoWorld, "shim": ShimWorld, "image": ImageWorld}


class Life:
    """Runs the phases of a lifecycle and records them in ``phases``."""

    def __init__(self, world: ComparedAgent, plan: dict[str, Any], director: Director, hm: HealthMonitor) -> None:
        self.world, self.plan, self.director, self.hm = world, plan, director, hm
        self.phases: list[Phase] = []
        self.notices = 0
        self.begun_at = time.monotonic()
        self.last: dict[str, int] = {}
        self.state: dict[str, Any] = {}
        self.has_acted = False
        """Whether the phase's action has been completed. Earlier states are not recorded."""
        self.seen = ""

    @property
    def cycle(self) -> float:
        return self.world.cycle

    @property
    def pidfiles(self) -> dict[str, Path]:
        return {one["name"]: Path(one["pidfile"]) for one in self.plan["services"] if one["pidfile"]}

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[Phase]:
        """Record a phase during the block."""
        self.now, self.has_acted, self.seen = Phase(name), False, ""
        self.begun_at = time.monotonic()
        watching = asyncio.create_task(self._watch(self.now))
        try:
            yield self.now
        except (RpcRemoteError, RpcTimeoutError, TimeoutError) as exc:
            self.now.value = f"error: {exc}" if str(exc) else "error: no answer"
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        self.has_acted = True
        await self._look(self.now, LAST_LOOK_S)
        self._end(self.now)

    def _end(self, phase: Phase) -> None:
        phase.seconds = round(time.monotonic() - self.begun_at, 2)
        pids = {name: living(path) for name, path in self.pidfiles.items()}
        phase.services = {name: pid > 0 for name, pid in pids.items()}
        phase.same = {name: pid > 0 and pid == self.last.get(name) for name, pid in pids.items()}
        self.last = pids
        phase.shapes["state"] = ", ".join(sorted(shape(self.state)))
        phase.values["state"] = flat(self.state)
        for notice in self.hm.notices[self.notices :]:
            if notice.kind == "alert":
                phase.alerts.append(re.sub(r" \([\d.:a-f]*\)", "", notice.body.get("title", "")))
            elif notice.kind == "heartbeat":
                phase.heartbeats.append(notice.body.get("job_state", ""))
                phase.shapes["heartbeat"] = ", ".join(sorted(shape(notice.body)))
                phase.values["heartbeat"] = flat(notice.body)
        self.notices = len(self.hm.notices)
        self.phases.append(phase)

    async def _watch(self, phase: Phase) -> None:
        while True:
            await self._look(phase)
            await asyncio.sleep(LOOK_S)

    async def _look(self, phase: Phase, patience: float = 1) -> None:
        try:
            state = await self.director.value(AGENT, "get_state", "full", timeout=patience)
        except (RpcRemoteError, RpcTimeoutError):
            return
        self.state = state
        self.seen = state["job_state"] if self.has_acted else ""
        note(phase.job_states, state["job_state"])
        if self.seen == "running" and phase.running_after < 0:
            phase.running_after = round(time.monotonic() - self.begun_at, 2)
        for process in state.get("processes") or []:
            note(phase.states.setdefault(process["name"], []), process["state"])

    async def until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Wait for up to ``seconds`` seconds until ``is_so`` returns True. Return False if the time runs out."""
        give_up_at = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > give_up_at:
                return False
            await asyncio.sleep(0.1)
        return True

    def is_running(self) -> bool:
        return self.seen == "running"

    async def settled(self, cycles: float) -> None:
        """Wait for ``cycles`` monit cycles, and then until the job's state has not changed for one and a half cycles.

        The second wait takes at most ten cycles.
        """
        self.has_acted = True
        await asyncio.sleep(cycles * self.cycle)
        stable_since = time.monotonic()
        give_up_at = stable_since + 10 * self.cycle
        while time.monotonic() < give_up_at:
            before = json.dumps(self.now.states)
            await asyncio.sleep(0.5)
            if not self.is_running() or json.dumps(self.now.states) != before:
                stable_since = time.monotonic()
            if time.monotonic() - stable_since > 1.5 * self.cycle:
                return

    async def unmonitored(self) -> None:
        """Wait for up to two cycles until the state shows that no service is monitored any more.

        This is necessary because the Go agent answers a drain before monit has handled all requests to unmonitor
        services.
        """
        seen = self.now.states.values()
        await self.until(lambda: all(states[-1] == "unknown" for states in seen), 2 * self.cycle)

    async def script(self, name: str, about: str = "", **options: Any) -> None:
        if f"bin/{name}" not in self.plan["files"]:
            return
        async with self.phase(about + name) as phase:
            value = await asyncio.wait_for(self.director.run(AGENT, "run_script", name, options), SCRIPT_LIMIT_S)
            phase.value = json.dumps(value)
        phase.texts["log"] = tail(VCAP / f"sys/log/{self.plan['job']}/{name}.stderr.log")

    async def _ask(self, phase: Phase, commands: Sequence[str]) -> None:
        """Run ``commands``, and record their exit codes and output.

        bpm commands are run only with the real bpm, and only for the job's first process.
        """
        named = {"job": self.plan["job"], "process": self.plan["bpm"]}
        for command in commands:
            place = "jobs/bpm/bin" if command.startswith("bpm ") else "bosh/bin"
            if place == "bosh/bin" or self.plan["bpm"]:
                words = command.format(**named)
                phase.texts[words] = await asyncio.to_thread(shell, f"/var/vcap/{place}/{words}")

    async def run(self, spec: dict[str, Any]) -> None:
        """Run all phases, but stop if the apply or the pre-start script fails."""
        if not await self._apply(spec):
            return
        await self.script("pre-start")
        if self.phases[-1].value.startswith("error"):
            return
        phase = await self._start("start")
        has_run = phase.running_after >= 0
        if has_run or not self.plan["services"]:
            await self.script("post-start")
            await self.script("post-deploy")
        async with self.phase("rest") as phase:
            await self.settled(max(5, self.plan["cycles"] + 2) if has_run and self.plan["services"] else 1)
            await self._ask(phase, (*COMMANDS, *BPM_COMMANDS))
            phase.texts["logs"] = "" if has_run else shell(f"tail -qn 3 /var/vcap/sys/log/{self.plan['job']}/*.log")
        for name, command in self.plan["acts"]:
            async with self.phase(name) as phase:
                phase.value = await asyncio.to_thread(shell, command)
                await self.settled(max(3, self.plan["cycles"] + 2))
        trials = self.plan["trials"]
        if has_run and self.pidfiles:
            await self._trials(trials)
        if "errand" in trials:
            async with self.phase("errand") as phase:
                result = await asyncio.wait_for(
                    self.director.run(AGENT, "run_errand", self.plan["job"]), SCRIPT_LIMIT_S
                )
                phase.value = json.dumps(result)
        if has_run or not self.plan["services"]:
            await self._updates(trials)
        await self._end_of_life()

    async def _apply(self, spec: dict[str, Any], about: str = "") -> bool:
        async with self.phase(f"{about}apply") as phase:
            await self.director.run(AGENT, "prepare", spec)
            phase.value = str(await asyncio.wait_for(self.director.run(AGENT, "apply", spec), 60 + 6 * self.cycle))
        self.world.applied()
        return phase.value == "applied"

    async def _start(self, name: str, patience: float = 0) -> Phase:
        """Start the job as a Director does.

        ``patience`` is the additional time in seconds that each service may need. monit starts the services one after
        the other.
        """
        async with self.phase(name) as phase:
            phase.value = str(await self.director.run(AGENT, "start"))
            self.has_acted = True
            await asyncio.sleep(1 + patience)  # The Director also waits before its first query.
            limit = START_LIMIT_S + START_LIMIT_CYCLES * self.cycle + patience * len(self.pidfiles)
            if not await self.until(self.is_running, limit) and any(map(living, self.pidfiles.values())):
                await self.until(self.is_running, START_LIMIT_S)  # monit may start each process in a different cycle.
        return phase

    async def _updates(self, wanted: list[str]) -> None:
        """Update the job. Then stop and start it as an operator would, first normally and then with slow start
        programs.
        """
        if "update" in wanted:
            spec = spec_of(self.plan | {"files": self.plan["second"]}, "2")
            await self.script("pre-stop", "update: ", env=NEXT)
            await self._drain("update: ", "update", spec)
            await self._stop("update: ")
            await self.script("post-stop", "update: ")
            if not await self._apply(spec, "update: "):
                return
            await self.script("pre-start", "update: ")
            await self._start("update: start")
        if "start after stop" in wanted:
            await self._stop("operator: ")
            await self._start("start after stop")
        if "slow start" in wanted and "update" in wanted and self.plan["slow"]:
            await self._stop("operator again: ")
            slow = STAND_IN / "slow"
            slow.write_text("\n".join([str(plans.SLOW_S), *self.plan["slow"]]))
            await self._start("slow start", plans.SLOW_S + self.cycle)
            slow.unlink()

    async def _trials(self, wanted: list[str]) -> None:
        if "death" in wanted:
            async with self.phase("death"):
                for path in self.pidfiles.values():
                    if pid := living(path):
                        os.kill(pid, signal.SIGKILL)
                await self.settled(2.5)
        before = {path: pid for path in self.pidfiles.values() if (pid := living(path))}
        if "empty pidfile" in wanted:
            async with self.phase("empty pidfile"):
                for path in self.pidfiles.values():
                    if path.exists():
                        path.write_text("")
                await self.settled(2.5)
            await self._put_back(before)
        if "monit restart" in wanted and self.pidfiles:
            name = next(iter(self.pidfiles))
            async with self.phase("monit restart") as phase:
                phase.value = await asyncio.to_thread(shell, f"/var/vcap/bosh/bin/monit restart {name}")
                await self.settled(3)
        if self.plan["ports"] and "port closed" in wanted:
            closed = VCAP / "packages/stand_in/closed"
            async with self.phase("port closed"):
                closed.touch()
                await asyncio.sleep((self.plan["cycles"] + 2) * self.cycle)
            async with self.phase("port open again"):
                closed.unlink()
                await self.settled(2.5)
        await self._rules(wanted)
        if "unmonitor" in wanted:
            await self._unmonitor()
        if "agent restarted" not in wanted:
            return
        async with self.phase("agent restarted"):
            self.world.restart()
            await self.director.wait_until_ready(AGENT, timeout=60)
            await self.settled(2)

    async def _rules(self, wanted: list[str]) -> None:
        """Create the conditions that rules about memory, CPU usage and changed files check for."""
        if "usage" in wanted and self.plan["usage"]:
            busy = STAND_IN / "busy"
            async with self.phase("usage"):
                busy.touch()
                least = (self.plan["cycles"] + 3) * self.cycle
                await asyncio.sleep(least)
                # A stand-in may get little CPU time on a busy machine, so wait until the rule has matched.
                await self.until(self._has_matched, USAGE_LIMIT_S)
            async with self.phase("usage ended"):
                busy.unlink()
                await self.settled(self.plan["cycles"] + 2.5)
        if "changed file" in wanted and self.plan["watched"]:
            async with self.phase("changed file"):
                await asyncio.sleep(1.1)  # monit compares mtimes in whole seconds.
                for path in map(Path, self.plan["watched"]):
                    with path.open("a") as file:
                        file.write("\n")
                await self.settled(self.plan["cycles"] + 2.5)

    def _has_matched(self) -> bool:
        """Return True if each service with a rule about memory or CPU usage has been in the ``failing`` state during
        this phase.
        """
        return all("failing" in self.now.states.get(name, []) for name in self.plan["usage"])

    async def _unmonitor(self) -> None:
        """Unmonitor a service as an operator would, kill its process, and monitor it again."""
        name, path = next(iter(self.pidfiles.items()))
        async with self.phase("unmonitor") as phase:
            for _ in range(MONIT_TRIES):  # monit rejects a second action while the first is in progress.
                phase.value = await asyncio.to_thread(shell, f"/var/vcap/bosh/bin/monit unmonitor {name}")
                if phase.value.startswith("0"):
                    break
                await asyncio.sleep(self.cycle)
            self.has_acted = True
            await asyncio.sleep(1.5 * self.cycle)
            if pid := living(path):
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(2.5 * self.cycle)
        async with self.phase("monitor again") as phase:
            phase.value = await asyncio.to_thread(shell, f"/var/vcap/bosh/bin/monit monitor {name}")
            await self.settled(3)

    async def _put_back(self, before: dict[Path, int]) -> None:
        """Write the pids in ``before`` to the pidfiles that are still empty, so that the remaining phases can find the
        processes.
        """
        empty = [path for path in before if path.exists() and not path.read_text().strip()]
        if empty:
            async with self.phase("pidfile filled again"):
                for path in empty:
                    path.write_text(f"{before[path]}\n")
                await self.settled(2.5)

    async def _end_of_life(self) -> None:
        await self.script("pre-stop", env=NEXT)
        await self._drain("", "shutdown", {})
        phase = await self._stop("")
        await self._ask(phase, ("monit summary", *BPM_COMMANDS[:2]))
        phase.files = sorted(left())
        await self.script("post-stop")

    async def _drain(self, about: str, kind: str, spec: dict[str, Any]) -> None:
        if "bin/drain" in self.plan["files"]:
            async with self.phase(f"{about}drain") as phase:
                drained = self.director.run(AGENT, "drain", kind, spec)
                phase.value = str(await asyncio.wait_for(drained, SCRIPT_LIMIT_S))
                await self.unmonitored()

    async def _stop(self, about: str) -> Phase:
        async with self.phase(f"{about}stop") as phase:
            limit = 2 * SCRIPT_LIMIT_S + 6 * self.cycle  # A stop waits for all services' stop programs.
            phase.value = str(await asyncio.wait_for(self.director.run(AGENT, "stop"), limit))
        phase.texts["processes"] = "\n".join(sorted(stand_ins()))
        return phase


def shape(value: Any, path: str = "") -> set[str]:
    """Return the path and type of every member in a document. All elements of a list have the same path."""
    if isinstance(value, dict):
        return {one for name, member in value.items() for one in shape(member, f"{path}.{name}".lstrip("."))}
    if isinstance(value, list):
        return {one for member in value for one in shape(member, f"{path}[]")}
    return {f"{path}: {'number' if isinstance(value, int | float) else type(value).__name__}"}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return a document's values by path. A list element is identified by its name or, if it has none, by its
    index.
    """
    if isinstance(value, dict) and value:
        return {where: one for name, member in value.items() for where, one in flat(member, f"{path}.{name}").items()}
    if isinstance(value, list) and value:
        named = [(one.get("name", at) if isinstance(one, dict) else at, one) for at, one in enumerate(value)]
        return {where: one for name, member in named for where, one in flat(member, f"{path}[{name}]").items()}
    return {path.lstrip("."): value}


def note(changes: list[str], now: str) -> None:
    if changes[-1:] != [now]:
        changes.append(now)


def living(pidfile: Path) -> int:
    """Return the pid in a pidfile if that process is running, otherwise 0."""
    try:
        pid = int(pidfile.read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return 0
    return pid if state != "Z" else 0


def stand_ins() -> list[str]:
    """Return the names of the running programs that come from packages."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            lines += [Path(word).name for word in words[:4] if re.match(r"/var/vcap/(data/)?packages/", word)][:1]
    return lines


def left() -> list[str]:
    """Return the path and mode of each file in the job directories. Files that belong to the agents are left out."""
    found = []
    for top in ("data/sys/run", "data/sys/log", "store", "data/jobs"):
        for place in (VCAP / top).rglob("*"):
            name = re.sub(r"/[0-9a-f]{40,}", "/DIGEST", str(place.relative_to(VCAP)))
            if not re.search(r"agent_shim|bpm\.log|/data/jobs/.*/\.", name) and not place.is_dir():
                found.append(f"{name} {place.lstat().st_mode & 0o7777:o}" if not place.is_symlink() else name)
    return found


def tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-4:])
    return ""


def shell(command: str) -> str:
    try:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "no end"
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


def archive(files: dict[str, str], modes: Callable[[str], int]) -> bytes:
    """Return a gzipped tarball. ``modes`` maps a path to its mode."""
    target = io.BytesIO()
    # Omit the time, so that the same files have the same digest in both environments.
    with (
        gzip.GzipFile(fileobj=target, mode="wb", compresslevel=1, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as packed,
    ):
        for name, text in files.items():
            member = tarfile.TarInfo(f"./{name}")
            content = text.encode(errors="surrogateescape")
            member.size, member.mode = len(content), modes(name)
            packed.addfile(member, io.BytesIO(content))
    return target.getvalue()


def spec_of(plan: dict[str, Any], version: str = "1") -> dict[str, Any]:
    """Write the blobs for the job and its packages, and return an apply spec that refers to them."""

    def blob(content: bytes) -> dict[str, str]:
        digest = hashlib.sha1(content).hexdigest()  # noqa: S324 - Directors use SHA-1
        (BLOBS / f"blob-{digest}").write_bytes(content)
        return {"blobstore_id": f"blob-{digest}", "sha1": digest}

    job = plan["job"]
    stand_in = f"env PYTHONPATH={os.environ['PYTHONPATH']} {sys.executable} -m {__package__}.bpm"
    real = "/var/vcap/packages/bpm/bin/bpm"
    bpm = f'#!/bin/sh\n[ ! -e {BPM} ] || exec {real} "$@"\nexec {stand_in} "$@" 2>>/mnt/agent.log\n'
    files = {job: plan["files"]} | ({"bpm": {"monit": "", "bin/bpm": bpm}} if job != "bpm" else {})
    bundle = {f"{name}/{path}": text for name, texts in files.items() for path, text in texts.items()}
    packages = {}
    for name, contents in plan["packages"].items():
        shown = contents or {"empty": ""}
        kept = {path: plans.STAND_IN_TEXT if text == plans.STAND_IN else text for path, text in shown.items()}
        packages[name] = {"name": name, "version": "1", **blob(archive(kept, lambda _: 0o755))}
    network = {"type": "manual", "ip": ADDRESS, "netmask": "255.255.255.0", "gateway": "10.244.0.1",
               "default": ["dns", "gateway"], "dns": [], "cloud_properties": {}}  # fmt: skip
    return {
        "deployment": "dep",
        "job": {
            "name": "group",
            "template": job,
            "version": "1",
            "release": "",
            "templates": [{"name": name, "version": version} for name in files],
        },
        "index": 0,
        "name": "group",
        "id": "instance-id",
        "az": "z1",
        "networks": {"default": network},
        "packages": packages,
        "configuration_hash": f"hash {version}",
        "persistent_disk": 0,
        "properties": {"logging": {"max_log_file_size": ""}},
        "resource_pool": {},
        "rendered_templates_archive": blob(archive(bundle, lambda name: 0o755 if "/bin/" in name else 0o644)),
    }


def add_network() -> None:
    """Create an interface with the instance's address. It is one end of a veth pair whose other end leads nowhere."""
    commands = (
        ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "outside"],
        ["ip", "address", "add", f"{ADDRESS}/24", "dev", "eth0"],
        ["ip", "link", "set", "outside", "up"],
        ["ip", "link", "set", "eth0", "up"],
        ["ip", "route", "add", "default", "via", "10.244.0.1"],
    )
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)


def settle_in(programs: list[str]) -> None:
    """Create everything that both agents expect from a stemcell, including stand-ins for ``programs``."""
    above = Path("/tmp/usr")
    above.mkdir()
    from tools.comparison import system_stand_ins

    system_stand_ins.put(above / "upper", dict.fromkeys(programs, plans.STAND_IN_TEXT))
    (above / "work").mkdir()
    lower = f"lowerdir=/usr,upperdir={above}/upper,workdir={above}/work"
    commands = (
        ["mount", "-t", "overlay", "overlay", "-o", lower, "/usr"],
        ["hostname", "instance"],
        ["mount", "--bind", "/proc/sys", "/proc/sys"],
        ["mount", "-o", "remount,bind,ro", "/proc/sys"],
    )
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    add_network()
    with Path("/etc/hosts").open("a") as hosts:
        hosts.write(f"\n{ADDRESS} instance\n")
    with Path("/etc/passwd").open("a") as users:
        users.write("syslog:x:104:4::/nonexistent:/usr/sbin/nologin\n")
    for name in ETC:
        Path("/etc", name).mkdir(parents=True, exist_ok=True)
    for name in TREE:
        (VCAP / name).mkdir(parents=True, exist_ok=True)
    (VCAP / "sys").symlink_to("data/sys")
    (VCAP / "instance/health.json").write_text('{"state":"running"}')
    group = 1000  # vcap's gid.
    for name in ("data/sys/run", "data/sys/log", "data/sys"):
        os.chown(VCAP / name, 0, group)
    for name in ("run", "log"):
        (VCAP / "data/sys" / name).chmod(0o775)
    (VCAP / "store").chmod(0o755)


async def main() -> None:
    kind, plan_path, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    plan = json.loads(plan_path.read_text())
    cycle = int(os.environ["CYCLE"])
    world = WORLDS[kind](plan, cycle)
    world.settle_in()
    spec = spec_of(plan)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # An agent may raise its own limit, but its children must inherit this one.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), hard))
    world.prepare()
    director, hm = Director(poll=0.2), HealthMonitor()
    bus = SCRATCH / "bus"
    bus.mkdir()
    async with NatsServer(bus) as server:
        await server.add_agent(AGENT)
        async with director.on(server.peer()), hm.on(server.peer(HEALTH_MONITOR)):
            world.configure(settings(server))
            world.start()
            life = Life(world, plan, director, hm)
            loop = asyncio.get_running_loop()
            watcher = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            watcher.bind(("127.0.0.1", OBSERVER))
            watcher.setblocking(False)
            loop.add_reader(watcher, lambda: heard(watcher, life))
            error = ""
            try:
                await director.wait_until_ready(AGENT, timeout=60)
                await life.run(spec)
            except Exception as exc:  # noqa: BLE001 - any failure is reported in the result
                error = f"{type(exc).__name__}: {exc}"
            document = {
                "world": kind,
                "error": error,
                "waited": round(waited(), 1),
                "phases": [asdict(phase) for phase in life.phases],
            }
            result.write_text(json.dumps(document, indent=1))


def heard(watcher: socket.socket, life: Life) -> None:
    """Record a message from a stand-in."""
    told = json.loads(watcher.recv(65536))
    if hasattr(life, "now"):
        if told["event"] == "script":
            life.now.scripts.append(told["name"])
        else:
            life.now.events.append([round(time.monotonic() - life.begun_at, 2), told["event"], told["name"]])
        if context := told.get("context"):
            known = life.now.contexts.setdefault(f"{told['name']} {told['event']}", [])
            if context not in known:
                known.append(context)


def waited() -> float:
    """Return how long this process has waited for a CPU, as a multiple of its CPU time."""
    ran, waiting, _ = map(int, Path("/proc/self/schedstat").read_text().split())
    return waiting / max(ran, 1)


def settings(server: NatsServer) -> dict[str, Any]:
    mbus = server.mbus(AGENT)
    cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}
    blobstore = {"provider": "local", "options": {"blobstore_path": str(BLOBS)}}
    network = {"type": "manual", "ip": ADDRESS, "netmask": "255.255.255.0", "gateway": "10.244.0.1"}
    return {
        "agent_id": AGENT,
        "vm": {"name": "vm-1"},
        "networks": {"default": network},
        "disks": {"system": "", "ephemeral": "", "persistent": {}},
        "env": {"bosh": {"mbus": {"urls": [server.url], "cert": cert}, "blobstores": [blobstore]}},
    }


if __name__ == "__main__":
    asyncio.run(main())
