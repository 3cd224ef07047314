"""R: too little of everything."""

from __future__ import annotations

import asyncio
import os
import resource
import time

from agent_shim.demo.director import RpcRemoteError, RpcTimeoutError
from benchmarks.world import AGENT
from chaos.cases import case
from chaos.stand import CannotInjectError, Stand, expect, until


@case("R-01", "the agent has no descriptors left", is_long=True)
async def descriptors(stand: Stand) -> str:
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
        expect(errors > 0, "the fault did not show")
    finally:
        resource.prlimit(stand.pid, resource.RLIMIT_NOFILE, (soft, hard))
    back = await stand.answers(5)
    await stand.world.director.run(AGENT, "fetch_logs", "job", [])
    return f"{errors} errors of 20; {back:.2f} s after they were there again it answered"


@case("R-05", "all processors are busy: 20 spinners a core", is_long=True)
async def starved(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    spinners = [await asyncio.create_subprocess_exec("sh", "-c", "while :; do :; done") for _ in range(40)]
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
    expect(longest < 1, f"a ping took {longest:.2f} s")
    return f"a ping took {longest * 1000:.0f} ms at most; a heartbeat within {beat:.0f} s"


@case("R-06", "no further process or thread may be made", is_long=True)
async def no_forks(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    stand.involved = None
    if resource.prlimit(stand.pid, resource.RLIMIT_NPROC) == (resource.RLIM_INFINITY, resource.RLIM_INFINITY):
        before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    else:
        before = resource.prlimit(stand.pid, resource.RLIMIT_NPROC)
    if os.geteuid() == 0:
        raise CannotInjectError("root is not bound by RLIMIT_NPROC; needs a pids cgroup")
    resource.prlimit(stand.pid, resource.RLIMIT_NPROC, (1, before[1]))
    try:
        await stand.call("ping")
        await stand.heartbeat(35)
    finally:
        resource.prlimit(stand.pid, resource.RLIMIT_NPROC, before)
    await until(lambda: len(stand.live()) == 3, 30, "all jobs run again")
    return "answers and beats all the time"
