"""Tests that an unmodified Go agent can run the same deployment with monit 5.2.5 and with this supervisor in monit's
place.

Run with ``MONIT_525=… ./dev test-monit-place BINARY``. Each machine has its own network, so each supervisor can listen
on monit's port. The Go agent runs with its test platform, which does not change the machine and has no password for
monit. The test stands in for runit: a loop restarts monit whenever it exits, and a task kills monit when the Go agent
waits for a reload.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.director import HealthMonitor, RpcRemoteError, RpcTimeoutError
from agent_shim.demo.pki import HEALTH_MONITOR
from tests.root.test_firewall import ProxiedPod
from tests.root.test_firewall import pod as netted  # noqa: F401 - a fixture
from tests.support import jobs, monitrc
from tests.support.go_agent import CTL, NAMES, starts
from tests.support.pod import AGENT, end

pytestmark = pytest.mark.go_agent

OURS: Final = f"{sys.executable} -m agent_shim.cli"
THEIRS: Final = "/mnt/monit -c /var/vcap/bosh/etc/monitrc"
FLAGS: Final = "-c /var/vcap/bosh/etc/monitrc"
KINDS: Final = {
    "agent-shim": (f"{OURS} monit -I {FLAGS}", f"{OURS}.monit"),
    "agent-shim and the command of monit": (f"{OURS} monit -I {FLAGS}", THEIRS),
    "monit 5.2.5": (f"/mnt/monit -I {FLAGS}", THEIRS),
}
"""For each way to supervise: the supervisor's command, and the client that the Go agent and operators call as
``monit``.
"""
KEEPER: Final = """
cd /
while :; do
    nice -n -10 {daemon} >>/mnt/monit.out 2>&1
    sleep 0.2
done
"""
RELOADS: Final = "Waiting for monit to reload"
ACTION: Final = re.compile(r"Running a?sync action (?:apply|start)\b")
REST_S: Final = float(os.environ.get("MONIT_PLACE_REST", "10"))
"""Number of seconds over which the idle supervisor's CPU time is measured."""


class SupervisedMachine:
    """A machine with the Go agent and one of the supervisors in ``KINDS``."""

    def __init__(self, made: ProxiedPod, kind: str) -> None:
        self.pod, self.kind = made, kind
        self.figures: dict[str, float] = {}
        self._reloader: asyncio.Task[None] | None = None
        self._entered: list[Any] = []

    def start(self) -> None:
        pod, (daemon, command) = self.pod, KINDS[self.kind]
        pod.keeps_root = True
        pod.start_container()
        shutil.copy(os.environ["BOSH_AGENT"], pod.machine.root / "mnt/bosh-agent")
        if "MONIT_525" in os.environ:
            shutil.copy(os.environ["MONIT_525"], pod.machine.root / "mnt/monit")
        for place in ("bosh/etc", "bosh/bin", "monit/job", *(f"data/{name}" for name in NAMES), "data/sys/run"):
            (pod.vcap / place).mkdir(parents=True, exist_ok=True)
        (pod.vcap / "monit/empty.monitrc").touch()
        files = {
            "bosh/etc/monitrc": monitrc.control(is_whole=True) + monitrc.alerts(),
            "bosh/bin/monit": f'#!/bin/sh\nexec {command} "$@"\n',
        }
        for name, text in files.items():
            (pod.vcap / name).write_text(text)
            (pod.vcap / name).chmod(0o700)
        keeper = KEEPER.format(daemon=daemon)
        self._entered.append(pod.machine.popen(["sh", "-c", keeper]))
        search = "PATH=/var/vcap/bosh/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        options = ["-P", "dummy", "-M", "monit", "-C", "/var/vcap/bosh/agent.json"]
        log = (pod.scratch / "go.log").open("ab")
        go = pod.machine.popen(["env", search, "/mnt/bosh-agent", *options], cwd="/", stdout=log, stderr=log)
        log.close()
        self._entered.append(go)
        self._reloader = asyncio.create_task(self._reload_when_asked())

    async def _reload_when_asked(self) -> None:
        log, seen, killed, last = self.pod.scratch / "go.log", 0, 0, -1
        while True:
            await asyncio.sleep(0.05)
            text = log.read_text(errors="replace") if log.exists() else ""
            asked, actions = text.count(RELOADS), len(ACTION.findall(text))
            # While the Go agent waits for a reload, it logs a line that matches RELOADS every second. After the first
            # such line in an action, kill monit. If ten more lines follow, kill it again.
            if asked > seen and (actions != last or asked - killed >= 10):
                killed, last = asked, actions
                with suppress(OSError, ValueError):
                    await asyncio.to_thread(self.pod.machine.run, f"kill -9 {self.daemon()}")
            seen = asked

    def daemon(self) -> int:
        """Return the supervisor's pid in the container's PID namespace."""
        return int((self.pod.vcap / "monit/monit.pid").read_text())

    def close(self) -> None:
        if self._reloader is not None:
            self._reloader.cancel()
        for one in self._entered:
            with suppress(OSError, ValueError):
                end(one, 9)  # type: ignore[arg-type]

    async def state(self) -> dict[str, Any]:
        """Return the Go agent's reply to ``get_state``, or an empty dictionary if there is no reply because monit is
        reloading.
        """
        try:
            found: dict[str, Any] = await self.pod.director.value(AGENT, "get_state", "full", timeout=5)
        except (RpcTimeoutError, RpcRemoteError):
            return {}
        return found

    async def until(self, job_state: str, seconds: float = 90) -> dict[str, Any]:
        async with asyncio.timeout(seconds):
            while (state := await self.state()).get("job_state") != job_state:
                await asyncio.sleep(0.05)
            return state

    async def until_all(self, names: tuple[str, ...], *, run: bool) -> None:
        async with asyncio.timeout(120):
            while not all(bool(self.run_pid(name)) is run for name in names):
                await asyncio.sleep(0.02)

    def run_pid(self, name: str) -> int:
        place = self.pod.machine.root / f"var/vcap/data/sys/run/{name}/{name}.pid"
        with suppress(OSError, ValueError):
            number = int(place.read_text())
            return number if (self.pod.machine.root / f"proc/{number}").exists() else 0
        return 0


@pytest.fixture(params=[kind for kind in KINDS if "MONIT_525" in os.environ or kind == "agent-shim"])
async def place(netted: ProxiedPod, request: pytest.FixtureRequest) -> AsyncIterator[SupervisedMachine]:  # noqa: F811
    made = SupervisedMachine(netted, request.param)
    made.start()
    try:
        yield made
    finally:
        made.close()


async def test_monit_daemon_serves_the_go_agent_through_a_deployment(place: SupervisedMachine) -> None:
    """The deployment consists of an apply, a start, a killed process with its alert, a stop, and a second start with
    one job fewer. The test prints how long each step took.
    """
    pod, monitor, figures = place.pod, HealthMonitor(), place.figures
    await pod.director.wait_until_ready(AGENT, timeout=90)
    await place.until("running")  # Without jobs, the state is "running" as soon as monit answers.
    files = {name: {"monit": jobs.sleeper(Paths(), name)["monit"], "bin/ctl": CTL.format(name=name)} for name in NAMES}
    async with monitor.on(pod.server.peer(HEALTH_MONITOR)):
        await pod.run("apply", jobs.spec(pod.scratch / "blobs", files, {"tool": {"bin/tool": "x"}}))
        begun_at = time.monotonic()
        await pod.run("start")
        figures["start answered"] = time.monotonic() - begun_at
        await place.until_all(NAMES, run=True)
        figures["all processes run"] = time.monotonic() - begun_at
        state = await place.until("running")
        figures["start, running"] = time.monotonic() - begun_at
        assert [each["name"] for each in state["processes"]] == list(NAMES)
        assert [len(pids) for pids in starts(pod.machine).values()] == [1, 1, 1]
        assert pod.machine.run("/var/vcap/bosh/bin/monit summary").count("running") == 1 + len(NAMES)
        assert pod.machine.run("/var/vcap/bosh/bin/monit monitor all 2>&1; echo $?") == "0\n"

        victim, begun_at = place.run_pid("web"), time.monotonic()
        pod.machine.run(f"kill -9 {victim}")
        async with asyncio.timeout(60):
            while place.run_pid("web") in (0, victim):
                await asyncio.sleep(0.01)
        figures["death, process again"] = time.monotonic() - begun_at
        notice = await monitor.wait_for("alert", AGENT, lambda body: body["title"].startswith("web "), timeout=60)
        figures["death, alert"] = time.monotonic() - begun_at
        assert " - Does not exist - restart" in notice.body["title"]
        assert notice.body["severity"] == 1
        await place.until("running")
        figures["death, running"] = time.monotonic() - begun_at

        figures |= await asyncio.to_thread(at_rest, place)

        begun_at = time.monotonic()
        await pod.run("stop")
        figures["stop answered"] = time.monotonic() - begun_at
        await place.until_all(NAMES, run=False)
        figures["no process runs"] = time.monotonic() - begun_at
        await place.until("stopped")

        less = {name: files[name] for name in NAMES[:2]}
        await pod.run("apply", jobs.spec(pod.scratch / "blobs", less, {"tool": {"bin/tool": "x"}}, version="2"))
        begun_at = time.monotonic()
        await pod.run("start")
        await place.until_all(NAMES[:2], run=True)
        state = await place.until("running")
        figures["second start, running"] = time.monotonic() - begun_at
        assert [each["name"] for each in state["processes"]] == list(NAMES[:2])
    sys.stdout.write(json.dumps({place.kind: {name: round(value, 2) for name, value in figures.items()}}) + "\n")


BPM: Final = os.environ.get("BPM", "")
"""Directory with bpm, runc and tini from the bpm release's package."""
BPM_JOBS: Final = {
    "bpm": {"monit": "", "bin/bpm": '#!/bin/sh\nexec /var/vcap/packages/bpm/bin/bpm "$@"\n'},
    "web": {
        "monit": """check process web with pidfile /var/vcap/sys/run/bpm/web/web.pid
  start program "/var/vcap/jobs/bpm/bin/bpm start web" with timeout 60 seconds
  stop program "/var/vcap/jobs/bpm/bin/bpm stop web" with timeout 60 seconds
  group vcap
""",
        "config/bpm.yml": "processes: [{name: web, executable: /bin/sleep, args: ['100000']}]\n",
    },
}


@pytest.mark.skipif(not BPM, reason="no bpm: set BPM to a directory with bpm, runc and tini")
async def test_real_bpm_and_runc_work_under_the_monit_daemon(place: SupervisedMachine) -> None:
    """When the supervisor is killed and restarted, the bpm process must keep running in the same cgroup. If the process
    is killed, it must be restarted in a new container. A stop must end the container.
    """
    pod = place.pod
    pidfile = pod.vcap / "data/sys/run/bpm/web/web.pid"

    def bpm(words: str) -> str:
        return pod.machine.run(f"/var/vcap/jobs/bpm/bin/bpm {words}")

    def pid() -> int:
        with suppress(OSError, ValueError):
            number = int(pidfile.read_text())
            return number if (pod.machine.root / f"proc/{number}").exists() else 0
        return 0

    def groups() -> set[str]:
        lines = (pod.machine.root / f"proc/{pid()}/cgroup").read_text().splitlines()
        return {line.rpartition("/")[2] for line in lines} - {""}

    async def until(fact: Callable[[], bool]) -> None:
        async with asyncio.timeout(90):
            while not fact():
                await asyncio.sleep(0.05)

    await pod.director.wait_until_ready(AGENT, timeout=90)
    await place.until("running")
    await pod.run("apply", jobs.spec(pod.scratch / "blobs", BPM_JOBS, {"tool": {"bin/tool": "x"}}))
    shutil.copytree(BPM, pod.vcap / "data/packages/bpm/bin")
    (pod.vcap / "packages/bpm").symlink_to("/var/vcap/data/packages/bpm")
    await pod.run("start")
    await place.until("running")
    first, named = pid(), groups()
    assert bpm("pid web").strip() == str(first)
    assert any(name.startswith("bpm-") for name in named), named

    daemon = place.daemon()
    pod.machine.run(f"kill -9 {daemon}")
    await until(lambda: place.daemon() != daemon)
    await place.until("running")
    assert (pid(), groups()) == (first, named)

    pod.machine.run(f"kill -9 {first}")
    await until(lambda: pid() not in (0, first))
    await place.until("running")
    assert bpm("pid web").strip() == str(pid())
    assert groups() == named

    await pod.run("stop")
    await until(lambda: not pid())
    await place.until("stopped")
    assert "running" not in bpm("list")


def at_rest(place: SupervisedMachine) -> dict[str, float]:
    """Return the CPU usage of the idle supervisor as a percentage of one CPU, and its memory in MiB."""
    root = place.pod.machine.root / "proc" / str(place.daemon())

    def ticks() -> int:
        fields = (root / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(REST_S)
    share = (ticks() - before) / os.sysconf("SC_CLK_TCK") / REST_S * 100
    sizes = dict(line.split(":") for line in (root / "smaps_rollup").read_text().splitlines()[1:])
    return {
        "processor at rest, %": share,
        "memory (RSS), MiB": int(sizes["Rss"].split()[0]) / 1024,
        "memory (PSS), MiB": int(sizes["Pss"].split()[0]) / 1024,
    }
