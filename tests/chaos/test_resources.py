"""Chaos cases in group R: resources are exhausted."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agent_shim.demo.director import RpcRemoteError, RpcTimeoutError
from tests.chaos.case import case
from tests.support.instance import AGENT
from tests.support.readings import cpu_seconds
from tests.support.stand import CONNECTED, CannotInjectError, Stand, at_most, expect, injecting, until


@case("R-01", "the agent has no file descriptors left", is_long=True)
async def test_agent_survives_running_out_of_descriptors(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    soft, hard = resource.prlimit(stand.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(stand.pid, resource.RLIMIT_NOFILE, (stand.size().descriptors + 2, hard))
    errors = 0
    try:
        for _ in range(20):
            try:
                await stand.world.director.run(AGENT, "fetch_logs", "job", [], timeout=5, limit=10)
            except (RpcRemoteError, RpcTimeoutError):
                errors += 1
        expect(errors > 0, "all requests succeeded although the agent had no descriptors left")
    finally:
        resource.prlimit(stand.pid, resource.RLIMIT_NOFILE, (soft, hard))
    back = await stand.answers(5)
    await stand.world.director.run(AGENT, "fetch_logs", "job", [])
    stand.tell(
        f"{errors} of 20 requests failed; the agent answered {back:.2f} s after descriptors were available again"
    )


@case("R-05", "all CPUs are busy with 20 spinning processes per core", is_long=True)
async def test_agent_answers_while_all_cpus_are_busy(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    spinners = [
        await asyncio.create_subprocess_exec("sh", "-c", "while :; do :; done")
        for _ in range(20 * (os.cpu_count() or 1))
    ]
    longest = 0.0
    try:
        for _ in range(30):
            begun_at = time.monotonic()
            await stand.call("ping", timeout=10)
            longest = max(longest, time.monotonic() - begun_at)
            await asyncio.sleep(0.3)
        beat = await stand.heartbeat(36)
    finally:
        for one in spinners:
            one.kill()
            await one.wait()
    expect(longest < 1, f"a ping took {longest:.2f} s, but the limit is 1 s")
    stand.tell(f"the slowest ping took {longest * 1000:.0f} ms; a heartbeat arrived within {beat:.0f} s")


@contextmanager
def cgroup(controller: str) -> Iterator[Path]:
    """Create a cgroup for the duration of the block. Afterwards, move its processes back to their previous cgroup."""
    top = Path("/sys/fs/cgroup") / controller
    try:
        place = Path(tempfile.mkdtemp(prefix="agent-shim-chaos-", dir=top))
    except OSError as exc:
        raise CannotInjectError(f"needs cgroup v1 with the {controller} controller: {exc.strerror}") from exc
    try:
        yield place
    finally:
        for pid in (place / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (top / "cgroup.procs").write_text(pid)
        place.rmdir()


@case("R-02", "no further process can be started", is_long=True)
async def test_agent_survives_running_out_of_processes(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    with cgroup("pids") as group:
        (group / "cgroup.procs").write_text(str(stand.pid))
        current = (group / "pids.current").read_text()
        (group / "pids.max").write_text(current)
        name, victim = next(iter(stand.live().items()))
        stand.dies(name)
        stand.told[rf"^{name} .* Execution failed - alert, severity 1$"] = None
        os.kill(victim, signal.SIGKILL)
        errors = 0
        for _ in range(5):
            try:
                await stand.world.director.run(AGENT, "fetch_logs", "job", [], timeout=5, limit=10)
            except RpcRemoteError:
                errors += 1
            await stand.call("ping", timeout=1)
        expect(errors > 0, "all requests succeeded although no process could be started")
        before = cpu_seconds(stand.pid)
        beat = await stand.heartbeat(31)
        used = cpu_seconds(stand.pid) - before
        expect(used < 3, f"the agent used {used:.1f} s of CPU time until the next heartbeat, as in a busy loop")
        (group / "pids.max").write_text("max")
        took = await until(lambda: len(stand.live()) == 3, 60, "the job that died was not restarted")
    stand.tell(
        f"{errors} of 5 requests failed; a heartbeat arrived within {beat:.0f} s; the job was running {took:.0f} s "
        "after the limit was removed"
    )


@case("R-04", "the agent deploys 8 packages and executes 300 tasks in a cgroup with 64 MiB of memory", is_long=True)
async def test_agent_works_with_a_memory_limit_of_64_mib(stand: Stand) -> None:
    await stand.boot()
    with cgroup("memory") as group:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        (group / "cgroup.procs").write_text(str(stand.pid))
        await stand.deploy(3, 8, 8 << 20)
        stand.remember()
        for _ in range(300):
            await stand.world.run("run_script", "nothing", {})
        most = int((group / "memory.max_usage_in_bytes").read_text())
        failed = int((group / "memory.failcnt").read_text())
        resident = at_most(stand.size().memory, 64 << 20, "the agent has {} bytes of resident memory")
    stand.tell(
        f"the agent's resident memory was {int(resident) >> 20} MiB; with the page cache, the cgroup used "
        f"{most >> 20} MiB and reached its limit {failed} times"
    )


@case("R-06", "no further threads, no local ports for connections, no random bytes", is_long=True)
async def test_agent_survives_running_out_of_threads_ports_and_random_bytes(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    with cgroup("pids") as group:
        for thread in Path(f"/proc/{stand.pid}/task").iterdir():
            (group / "tasks").write_text(thread.name)
        (group / "pids.max").write_text((group / "pids.current").read_text())
        answers = await asyncio.gather(*(stand.call("get_state", "full", timeout=10) for _ in range(50)))
        expect(
            all(one["job_state"] == "running" for one in answers),
            "a reply to get_state does not say that the jobs are running",
        )
        beat = await stand.heartbeat(31)
        (group / "pids.max").write_text("max")
    links = stand.proxy.connections
    async with injecting(stand, "connect:error=EADDRNOTAVAIL"):
        stand.proxy.cut()
        await asyncio.sleep(8)
        expect(stand.proxy.connections == links, "the agent connected although no local port was available")
    back = await stand.answers(CONNECTED)
    async with injecting(stand, "getrandom:error=EAGAIN"):
        for _ in range(5):
            with suppress(RpcRemoteError, RpcTimeoutError):
                await stand.world.director.run(AGENT, "run_script", "nothing", {}, timeout=2, limit=5)
        await stand.call("ping", timeout=5)
    await stand.world.run("run_script", "nothing", {})
    stand.tell(
        f"without further threads, 50 get_state requests were answered and a heartbeat arrived within {beat:.0f} s; "
        f"the agent was back {back:.1f} s after ports were available again"
    )
