"""Chaos cases that need their own kernel: cgroup v2 with memory limits, hanging disks, changed clocks and lossy
networks.

They run only in the virtual machine provided by ``tests.support.guest``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from agent_shim.demo.director import RpcRemoteError, RpcTimeoutError
from agent_shim.demo.pki import Pair
from agent_shim.host import cgroups, job_cgroups
from tests.chaos.case import case
from tests.support.instance import AGENT, BYSTANDER, bystander
from tests.support.stand import CONNECTED, CannotInjectError, Stand, at_most, expect, until

HOUR = 3600.0
CONTAINER = 300 << 20
"""Memory limit of the container in R-03, in bytes."""

EXPIRED = "the client certificate of the bus expired at"
"""Beginning of the agent's warning about its certificate in N-07."""

_EATER = {
    "monit": """
check process {name}
  with pidfile {base}/data/sys/run/{name}/{name}.pid
  start program "{base}/jobs/{name}/bin/ctl start"
  stop program "{base}/jobs/{name}/bin/ctl stop"
  group vcap
""",
    "bin/ctl": """#!/bin/sh
run={base}/data/sys/run/{name}
case $1 in
start)
  mkdir -p $run {base}/data/{name}
  echo $$ | tee -a {base}/data/{name}/starts > $run/{name}.pid
  while [ ! -e {base}/data/{name}/eat ]; do sleep 0.1; done
  rm {base}/data/{name}/eat
  exec tail </dev/zero ;;
stop) kill $(cat $run/{name}.pid); rm -f $run/{name}.pid ;;
esac
""",
}
"""Files of a job that allocates memory without limit as soon as an ``eat`` file exists."""
_LIMITED = {
    "monit": """
check process {name}
  with pidfile {base}/data/sys/run/bpm/{name}/{name}.pid
  start program "{base}/jobs/bpm/bin/bpm start {name}"
  stop program "{base}/jobs/bpm/bin/bpm stop {name}"
  group vcap
""",
    "config/bpm.yml": """
processes:
- name: {name}
  executable: /bin/sh
  args:
  - -c
  - |
    while [ ! -e {base}/data/{name}/eat ]; do sleep 0.1; done
    rm {base}/data/{name}/eat
    exec tail </dev/zero
  ephemeral_disk: true
  limits: {{memory: 64M}}
""",
}


def _files(kind: dict[str, str], name: str, stand: Stand) -> dict[str, str]:
    return {path: text.format(name=name, base=stand.world.base) for path, text in kind.items()}


def _named(name: str, alerts: list[dict[str, Any]]) -> bool:
    return any(name in json.dumps(one) for one in alerts)


@contextmanager
def container(limit: int) -> Iterator[Path]:
    """Create a cgroup v2 with a memory limit, and mark it as delegated, as systemd does."""
    ours = cgroups.find().memory
    if ours is None or ours.version != 2:
        raise CannotInjectError("needs cgroup v2 with the memory controller")
    top = job_cgroups.parent_of_job_cgroups(ours)
    place = top / "container"
    (top / "cgroup.subtree_control").write_text("+memory +pids")
    place.mkdir()
    (place / "memory.max").write_text(str(limit))
    os.setxattr(place, "user.delegate", b"1")
    (place / "agent").mkdir()
    try:
        yield place
    finally:
        (place / "cgroup.kill").write_text("1")
        for group in sorted((path for path in place.rglob("*") if path.is_dir()), reverse=True):
            _remove(group)
        _remove(place)


def _remove(group: Path) -> None:
    """Remove a cgroup once its killed processes have exited."""
    for _ in range(1000):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)


@case(
    "R-03",
    "a job or the container exceeds its memory limit, and the kernel kills one process or all",
    scale="60 s instead of 30 s to come back",
    guest=True,
)
async def test_jobs_killed_at_a_memory_limit_are_reported_and_restarted(stand: Stand) -> None:
    if "vcap:" not in Path("/etc/passwd").read_text():
        _do("useradd", "--uid", "1000", "vcap")
    stand.world.scratch.chmod(0o755)
    group = stand.after.enter_context(container(CONTAINER))
    enter = f'echo 0 >{group}/agent/cgroup.procs; exec "$@"'
    stand.world.command = f"sh -c {shlex.quote(enter)} sh {stand.world.command}"
    await stand.boot()
    more = {"limited": _files(_LIMITED, "limited", stand), "eater": _files(_EATER, "eater", stand)}
    await stand.deploy(3, more=more)
    stand.remember()
    stand.involved = set(more)
    stand.told = dict.fromkeys(("^limited ", "^eater "))
    data = stand.world.base / "data"

    (data / "limited/eat").touch()
    said = await until(
        lambda: stand.alerts("used 64.0 MiB, its limit is 64.0 MiB: it was killed"),
        120,
        "no alert reported that the job reached its limit",
    )
    await stand.world.until_running()
    (data / "eater/eat").touch()
    alone = await until(
        lambda: _named("eater", stand.alerts("because memory ran out")),
        120,
        "no alert named the job that ran out of memory",
    )
    await stand.world.until_running()
    expect(len(stand.ends) == 0, "the agent was killed together with a job")
    expect(
        {len(pids) for name, pids in stand.world.starts().items() if name != "eater"} == {1},
        "other jobs were restarted",
    )

    before = stand.live()
    (group / "memory.oom.group").write_text("1")
    stand.expected_ends, stand.involved = 1, set(stand.live())
    stand.told |= {r"^job\d .* Does not exist - restart, severity 1$": None}
    (data / "eater/eat").touch()
    await until(lambda: len(stand.ends) == 1, 120, "the agent was not killed with its container")
    begun_at = time.monotonic()
    await until(
        lambda: len(stand.live()) == 5 and not set(stand.live().values()) & set(before.values()),
        60,
        "not all jobs ran again",
    )
    await stand.answers(10)
    await stand.world.until_running()
    back = at_most(time.monotonic() - begun_at, 60, "everything ran only after {:.2f} s")
    stand.tell(
        f"reported after {said:.1f} s (limit of the job) and {alone:.1f} s (container); "
        f"everything was running {back:.1f} s after the whole container was killed"
    )


@case("N-07", "the agent's certificate expires while it is connected, because the clock is set 2 h ahead", guest=True)
async def test_agent_reports_an_expired_certificate_and_reconnects_with_a_new_one(stand: Stand) -> None:
    def settings(pair: Pair) -> None:
        document = json.loads(stand.world.source.read_text())
        document["env"]["bosh"]["mbus"]["cert"] |= {"certificate": pair.certificate, "private_key": pair.private_key}
        stand.world.source.write_text(json.dumps(document))

    authority = stand.world.server.authority
    stand.world.write_settings()
    settings(authority.agent(AGENT, valid=(-HOUR, HOUR)))
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    links = stand.proxy.connections
    with _clock(2 * HOUR):
        beat = await stand.heartbeat(35)
        await stand.answers(1)
        expect(stand.proxy.connections == links, "the agent gave up a connection that the server still accepted")
        vitals = (await stand.call("get_state", "full"))["vitals"]
        expect(int(vitals["uptime"]["secs"]) >= 0, "the uptime is negative")
        await until(lambda: EXPIRED in _log(stand), 70, "the log did not report the expired certificate")

        stand.proxy.cut()
        await asyncio.sleep(30)
        attempts = stand.proxy.connections - links
        expect(attempts > 1, "the agent did not try to connect again")
        expect(attempts <= 30, f"the agent tried to connect {attempts} times in 30 s, but the limit is 30")
        expect(
            "bus_certificate_expiry_timestamp_seconds" in stand.scrape(),
            "there is no metric for the expiry of the certificate",
        )
        try:
            await stand.call("ping", timeout=1)
        except RpcTimeoutError:
            pass
        else:
            expect(False, "the server accepted an expired certificate")
        told = _log(stand).count(EXPIRED)
        expect(told == 1, f"the log reports the expired certificate {told} times instead of once")

        settings(authority.agent(AGENT))
        back = await stand.answers(CONNECTED + 8)
    stand.tell(
        f"a heartbeat arrived {beat:.0f} s later; {attempts} attempts to connect in 30 s; the agent was back "
        f"{back:.1f} s after it got a valid certificate"
    )


def _log(stand: Stand) -> str:
    return (stand.world.scratch / "agent.log").read_text(errors="replace")


@contextmanager
def _clock(ahead: float) -> Iterator[None]:
    """Set this machine's wall clock ahead during the block."""
    begun_at = time.time(), time.monotonic()
    time.clock_settime(time.CLOCK_REALTIME, begun_at[0] + ahead)
    try:
        yield
    finally:
        time.clock_settime(time.CLOCK_REALTIME, begun_at[0] + time.monotonic() - begun_at[1])


@case("D-04", "a disk hangs", scale="60 s instead of 600 s", has_full=True, guest=True)
async def test_hanging_disk_does_not_delay_requests_or_heartbeats(stand: Stand) -> None:
    volume = stand.world.scratch / "volume"
    name = stand.after.enter_context(_mapped(stand.world.scratch / "image", volume))
    stand.world.write_settings()
    document = json.loads(stand.world.source.read_text())
    document["disks"] = {"persistent": {"disk-1": {"path": str(volume)}}}
    stand.world.source.write_text(json.dumps(document))
    await stand.boot()
    await stand.world.run("mount_disk", "disk-1")
    expect(await stand.world.director.run(AGENT, "list_disk") == ["disk-1"], "the disk is not mounted")
    await stand.deploy(3)
    expect(
        "persistent" in (await stand.call("get_state", "full"))["vitals"]["disk"],
        "get_state returns no vitals of the persistent disk",
    )
    stand.remember()
    store, lasting = stand.world.base / "store", stand.of(60, 600)
    longest, others, beats = 0.0, 0.0, len(stand.monitor.of("heartbeat", AGENT))
    async with bystander(stand.world):
        with _suspended(name):
            writer = await asyncio.create_subprocess_exec("sh", "-c", f"echo x >{store}/x; sync {store}/x")
            ends_at = time.monotonic() + lasting
            while time.monotonic() < ends_at:
                for request in (("ping",), ("get_state", "full")):
                    longest = max(longest, await _seconds(stand, AGENT, *request))
                others = max(others, await _seconds(stand, BYSTANDER, "ping"))
                await asyncio.sleep(0.5)
            expect(writer.returncode is None, "a write to the suspended disk did not hang")
            beats = len(stand.monitor.of("heartbeat", AGENT)) - beats
            expect(beats >= lasting // 30, f"only {beats} heartbeats in {lasting} s")
    await asyncio.wait_for(writer.wait(), 30)
    await stand.answers(1)
    told = f"a request took at most {longest * 1000:.0f} ms, one to an echo server {others * 1000:.0f} ms"
    # Add the echo server's response time to the limit, because an emulated processor may stall for a second.
    expect(longest < 2 + others, f"{told}, but the agent may take at most 2 s longer")
    stand.tell(f"{told}; {beats} heartbeats in {lasting} s")


async def _seconds(stand: Stand, agent: str, method: str, *arguments: object) -> float:
    """Send a request and return how many seconds the reply took."""
    begun_at = time.monotonic()
    await stand.world.director.value(agent, method, *arguments, timeout=20)
    return time.monotonic() - begun_at


@contextmanager
def _mapped(image: Path, point: Path) -> Iterator[str]:
    """Mount a volume through the device mapper. Yield the device name."""
    # Use a new name each time, because the previous device might not have been removed yet.
    name = f"agent-shim-chaos-{uuid.uuid4().hex[:8]}"
    point.mkdir()
    _do("truncate", "-s", "64M", str(image))
    loop = _do("losetup", "--find", "--show", str(image))
    _do("dmsetup", "create", name, "--table", f"0 {(64 << 20) // 512} linear {loop} 0")
    _do("mkfs.ext4", "-q", f"/dev/mapper/{name}")
    _do("mount", f"/dev/mapper/{name}", str(point))
    try:
        yield name
    finally:
        _do("umount", "--lazy", str(point))
        _do("dmsetup", "remove", "--retry", "--deferred", name)
        _do("losetup", "--detach", loop)


@contextmanager
def _suspended(name: str) -> Iterator[None]:
    """Make all reads from and writes to the volume hang during the block."""
    _do("dmsetup", "suspend", "--nolockfs", "--noflush", name)
    try:
        yield
    finally:
        _do("dmsetup", "resume", name)


@case(
    "N-15",
    "packets are delayed by 0.5 ± 0.3 s, lost, duplicated and reordered",
    scale="2 % packet loss instead of 20 %",
    guest=True,
)
async def test_requests_are_answered_over_a_lossy_connection(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    requests = []
    # Keep the packet loss low. With 20% loss, TCP itself needs 5 s or more for one request in ten.
    async with _netem(stand.proxy.port, "delay 500ms 300ms loss 2% duplicate 5%"):
        beats, begun_at = len(stand.monitor.of("heartbeat", AGENT)), time.monotonic()
        for number in range(20):
            asked_at = time.monotonic()
            try:
                await stand.call("get_state" if number % 2 else "ping", timeout=10)
            except (RpcTimeoutError, RpcRemoteError) as exc:
                expect(False, f"request {number} failed: {exc}")
            requests.append(time.monotonic() - asked_at)
        beat = await stand.heartbeat(36)
        took = time.monotonic() - begun_at
        beats = len(stand.monitor.of("heartbeat", AGENT)) - beats
        expect(beats >= int(took / 35), f"only {beats} heartbeats arrived in {took:.0f} s")
    # Removing the qdisc also drops the packets in its queue, so wait until they are retransmitted.
    await stand.answers(10)
    expect(max(requests) < 5, f"a request took {max(requests):.1f} s, but the limit is 5 s")
    stand.tell(f"the slowest request took {max(requests):.1f} s; a heartbeat arrived within {beat:.0f} s")


@asynccontextmanager
async def _netem(port: int, how: str) -> AsyncIterator[None]:
    """Simulate a bad network for packets to and from one port on the loopback interface."""
    _do("tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "prio", "bands", "4")
    try:
        _do("tc", "qdisc", "add", "dev", "lo", "parent", "1:4", "handle", "30:", "netem", *how.split())
        for side in ("sport", "dport"):
            match = ("u32", "match", "ip", side, str(port), "0xffff", "flowid", "1:4")
            _do("tc", "filter", "add", "dev", "lo", "parent", "1:", "protocol", "ip", *match)
        yield
    finally:
        _do("tc", "qdisc", "del", "dev", "lo", "root")


def _do(*argv: str) -> str:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotInjectError(f"{' '.join(argv[:2])}: {done.stderr.strip()}")
    return done.stdout.strip()
