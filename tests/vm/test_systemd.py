"""Tests the systemd unit on a machine with systemd as PID 1 and only cgroup v2: restarts, memory limits, kills and
vitals.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.director import Director, HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR
from tests.support import jobs
from tests.support.broker import NatsServer
from tests.support.source import ROOT
from tests.support.waiting import TIMEOUT_S

pytestmark = pytest.mark.vm

AGENT = "agent-of-the-guest"
UNIT = "agent-shim.service"
GROUP = Path("/sys/fs/cgroup/system.slice") / UNIT
SETTINGS = Path("/var/vcap/bosh/warden-cpi-agent-env.json")
MIB = 1 << 20

BPM = "/var/vcap/jobs/bpm/bin/bpm"
PROCESSES = ("hungry", "modest")
MONIT = "".join(
    f"""check process {name} with pidfile /var/vcap/sys/run/bpm/web/{name}.pid
  start program "{BPM} start web -p {name}"
  stop program "{BPM} stop web -p {name}"
  group vcap
"""
    for name in PROCESSES
)
BPM_YML = """
processes:
- name: hungry
  executable: /bin/sh
  args:
  - -c
  - |
    sleep 1000 &
    while [ ! -e /var/vcap/data/web/eat ]; do sleep 0.1; done
    rm /var/vcap/data/web/eat
    head -c 200M /dev/zero | tail -c 200M
    wait
  ephemeral_disk: true
  limits: {memory: 64M}
- name: modest
  executable: /bin/sleep
  args: [1000]
  limits: {memory: 64M}
"""


@dataclass(frozen=True)
class Guest:
    """The agent on the virtual machine, and its Director, Health Monitor and blob directory."""

    director: Director
    monitor: HealthMonitor
    blobs: Path

    async def deploy(self) -> None:
        """Deploy a job with two bpm processes, one of which allocates memory on request, and a job with a ctl
        script.
        """
        release = {"web": {"monit": MONIT, "config/bpm.yml": BPM_YML}, "old": jobs.sleeper(Paths(), "old")}
        spec = jobs.spec(self.blobs, release)
        await self.director.run(AGENT, "apply", spec)
        await self.director.run(AGENT, "start")
        await until_true(self.is_running)

    async def is_running(self) -> bool:
        return bool((await self.state())["job_state"] == "running")

    async def state(self, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.director.value(AGENT, "get_state", *arguments)
        return found

    def pid(self, name: str) -> int:
        path = Path("/var/vcap/sys/run", f"bpm/web/{name}.pid" if name in PROCESSES else f"{name}/{name}.pid")
        return int(path.read_text())

    async def exceed_memory_limit(self) -> str:
        """Make a process exceed its memory limit and wait until it has been restarted. Return the alert."""
        before = self.pid("hungry")
        Path("/var/vcap/data/web/eat").touch()
        said: str = await until_true(self.alert)
        await until_true(lambda: self.pid("hungry") != before)
        await until_true(self.is_running)
        return said

    def alert(self) -> str:
        found = [str(one.body) for one in self.monitor.of("alert", AGENT) if "it was killed" in str(one.body)]
        return found[0] if found else ""


async def until_true(condition: Any) -> Any:
    """Wait until ``condition`` returns a true value, and return this value. Retries after ``OSError`` and
    ``ValueError``.
    """
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                found = condition()
                if asyncio.iscoroutine(found):
                    found = await found
                if found:
                    return found
            except (OSError, ValueError):
                pass
            await asyncio.sleep(0.1)


def pids_of_hungry() -> list[str]:
    """Return the pids in the ``hungry`` process's cgroup: its init, the process itself and its helper.

    Return an empty list until all of them exist.
    """
    members = [pid for path in GROUP.glob("agent_shim/*hungry*/cgroup.procs") for pid in path.read_text().split()]
    return members if len(members) > 2 else []


def systemctl(*arguments: str) -> str:
    return subprocess.run(["systemctl", *arguments], check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def drop_in(text: str) -> Iterator[None]:
    """Change a setting in the unit for the duration of the block. The caller has to restart the unit."""
    path = Path(f"/etc/systemd/system/{UNIT}.d/test.conf")
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"[Service]\n{text}\n")
    systemctl("daemon-reload")
    try:
        yield
    finally:
        path.unlink()
        systemctl("daemon-reload")


@pytest.fixture(scope="module", autouse=True)
def overlay() -> None:
    """Install the agent on a Debian machine by applying the overlay."""
    subprocess.run([ROOT / "stemcell_overlay/apply", "/"], check=True)
    systemctl("daemon-reload")


@pytest.fixture
async def guest(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Guest]:
    """Provide an agent that runs in the systemd unit and is connected to the bus.

    To change a unit setting, pass it as this fixture's parameter.
    """
    director, monitor, store = Director(poll=0.1), HealthMonitor(), tmp_path / "blobs"
    store.mkdir()
    async with NatsServer(tmp_path / "bus") as server:
        await server.add_agent(AGENT)
        mbus = server.mbus(AGENT)
        cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}
        blobstores = [{"provider": "local", "options": {"blobstore_path": str(store)}}]
        settings = {
            "agent_id": AGENT,
            "vm": {"name": "guest"},
            "networks": jobs.NETWORKS,
            "env": {"bosh": {"mbus": {"urls": list(mbus.urls), "cert": cert}, "blobstores": blobstores}},
        }
        SETTINGS.touch(mode=0o600)
        SETTINGS.write_text(json.dumps(settings))
        with drop_in(getattr(request, "param", "")):
            async with director.on(server.peer()), monitor.on(server.peer(HEALTH_MONITOR)):
                systemctl("start", UNIT)
                try:
                    await director.wait_until_ready(AGENT, timeout=TIMEOUT_S)
                    yield Guest(director, monitor, store)
                finally:
                    await director.run(AGENT, "stop")
                    systemctl("stop", UNIT)
                    for place in ("bosh", "data/bosh"):
                        for path in Path("/var/vcap", place).glob("*.json"):
                            if path.name != "agent.json":
                                path.unlink()


async def test_unit_restart_keeps_jobs_running(guest: Guest) -> None:
    await guest.deploy()
    first, before = systemctl("show", "--value", "-p", "MainPID", UNIT), {n: guest.pid(n) for n in (*PROCESSES, "old")}
    assert systemctl("is-active", UNIT) == "active"
    assert Path(f"/proc/{first}/cgroup").read_text().strip() == f"0::/system.slice/{UNIT}/agent"
    systemctl("restart", UNIT)
    await guest.director.wait_until_ready(AGENT, timeout=TIMEOUT_S)
    await until_true(guest.is_running)

    assert systemctl("show", "--value", "-p", "MainPID", UNIT) != first
    assert {name: guest.pid(name) for name in before} == before
    limits = [path.read_text().strip() for path in GROUP.glob("agent_shim/*/memory.max")]
    assert limits == [str(64 * MIB)] * 2


async def test_kernel_kills_the_whole_cgroup_of_a_process_above_its_memory_limit(guest: Guest) -> None:
    await guest.deploy()
    others = {name: guest.pid(name) for name in ("modest", "old")}
    members: list[str] = await until_true(pids_of_hungry)
    said = await guest.exceed_memory_limit()

    assert "process hungry of job web used 64.0 MiB, its limit is 64.0 MiB: it was killed" in said
    assert {name: guest.pid(name) for name in others} == others
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("guest", ["Delegate=no\nDelegateSubgroup="], indirect=True)
async def test_agent_kills_a_process_above_its_memory_limit_without_delegated_cgroups(guest: Guest) -> None:
    """Without delegated cgroups, the agent itself measures memory, so it kills the process only when its memory is
    slightly above the limit.
    """
    await guest.deploy()
    others = {name: guest.pid(name) for name in ("modest", "old")}
    assert not list(GROUP.glob("**/memory.max"))[1:], "no cgroup below the unit's"
    said = await guest.exceed_memory_limit()

    used = re.search(r"process hungry of job web used ([0-9.]+) MiB, its limit is 64.0 MiB: it was killed", said)
    assert used is not None
    assert float(used[1]) > 64
    assert {name: guest.pid(name) for name in others} == others


@pytest.mark.parametrize("guest", ["MemoryMax=400M"], indirect=True)
async def test_memory_vitals_describe_the_unit_relative_to_its_limit(guest: Guest) -> None:
    await guest.deploy()
    vitals = (await guest.state("full"))["vitals"]["mem"]
    current = int((GROUP / "memory.current").read_text())

    used, percent = int(vitals["kb"]) * 1024, int(vitals["percent"])
    assert 0 < used < current + 20 * MIB
    assert percent == pytest.approx(100 * used / (400 * MIB), abs=1)


@pytest.mark.parametrize("guest", ["MemoryMax=250M\nOOMPolicy=kill"], indirect=True)
async def test_jobs_are_restored_after_the_whole_unit_was_killed(guest: Guest) -> None:
    await guest.deploy()
    assert (GROUP / "memory.oom.group").read_text().strip() == "1"
    first, before = systemctl("show", "--value", "-p", "MainPID", UNIT), {n: guest.pid(n) for n in (*PROCESSES, "old")}
    script = f"echo $$ >{GROUP}/agent/cgroup.procs; head -c 400M /dev/zero | tail -c 400M"
    eater = await asyncio.create_subprocess_exec("sh", "-c", script)
    assert await eater.wait() == -signal.SIGKILL
    await guest.director.wait_until_ready(AGENT, timeout=TIMEOUT_S)
    await until_true(guest.is_running)

    assert systemctl("show", "--value", "-p", "MainPID", UNIT) != first
    assert not set(before.values()) & {guest.pid(name) for name in before}
