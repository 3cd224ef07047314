"""Tests the agent as a process: how it starts, handles signals and exits, and what it does if its settings arrive late
or a second agent runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shlex
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.director import Director, HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR
from agent_shim.demo.release import archive
from agent_shim.host import files, process
from tests.support import jobs
from tests.support.broker import NatsServer
from tests.support.bus import connected, on_bus
from tests.support.instance import AGENT, COMMAND, RunningAgent
from tests.support.ports import free_address
from tests.support.waiting import TIMEOUT_S, until
from tests.support.web import page
from tests.support.world import world as contract_world


def readiness(address: str, level: str) -> tuple[int, str]:
    """Return the status and body of the response to a readiness probe at ``level``."""
    return page(f"http://{address}/readyz?level={level}", timeout=20)


async def test_agent_exits_with_0_on_sigterm_and_leaves_the_jobs_running(instance: RunningAgent) -> None:
    before = await instance.deploy(2)

    assert await instance.stop_agent() == 0
    assert all(Path(f"/proc/{pid}").exists() for pid in before.values())
    await instance.start_agent()
    await instance.until_running()
    assert instance.pids() == before


@pytest.mark.attack("a job reads the agent's memory or core file")
async def test_agent_raises_only_its_own_file_limit_and_dumps_no_core(instance: RunningAgent) -> None:
    """The agent needs a descriptor for each process, but jobs keep the container's soft limit, as under the Go agent
    and monit. The agent's core file would contain its private key.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    core = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (core[1], core[1]))
    try:
        await instance.start_agent()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_CORE, core)
    await instance.deploy(2)

    assert resource.prlimit(instance.pid, resource.RLIMIT_NOFILE) == (hard - 1, hard)
    assert {resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in instance.pids().values()} == {(512, hard)}
    assert resource.prlimit(instance.pid, resource.RLIMIT_CORE) == (process.CORE_LIMIT_BYTES, core[1])


async def test_agent_waits_until_the_settings_file_is_complete(instance: RunningAgent) -> None:
    instance.write_settings()
    source = instance.scratch / "settings.json"
    whole = source.read_text()
    source.write_text(whole[:100])
    starting = asyncio.create_task(instance.start_agent())
    await until(lambda: "waiting for it to change" in instance.log_text())
    assert (await instance.execute("probe", "live"))[0] == 0
    status, output = await instance.execute("probe", "ready")
    assert (status, "waiting for settings" in output) == (1, True)

    source.write_text(whole)

    await starting
    assert (await instance.execute("probe", "ready"))[0] == 0


async def test_liveness_probe_passes_for_a_suspended_agent_and_fails_for_a_dead_one(instance: RunningAgent) -> None:
    """Kubernetes kills a container whose liveness probe fails, so the probe must not wait for an agent that gets no CPU
    time.
    """
    await instance.start_agent()
    os.kill(instance.pid, signal.SIGSTOP)
    try:
        assert await instance.execute("probe", "live") == (0, "alive\n")
    finally:
        os.kill(instance.pid, signal.SIGCONT)

    await instance.kill_agent()

    status, output = await instance.execute("probe", "live")
    assert (status, "agent_shim.lock: no process has locked it" in output) == (69, True)


async def test_exit_codes_distinguish_reasons_why_a_command_or_agent_cannot_run(
    instance: RunningAgent,
) -> None:
    status, output = await instance.execute("status")
    assert status == 69
    assert "cannot ask the agent at" in output

    broken, out = instance.scratch / "broken.json", instance.scratch / "out"
    broken.write_text("{")
    argv = [*shlex.split(COMMAND)[:3], "run", "-C", str(broken), "-b", str(instance.base)]
    assert await process.spawn(argv, env=dict(os.environ), stdout=out, stderr=out).wait() == 78
    assert "cannot read the agent's configuration from" in out.read_text()

    await instance.start_agent()
    assert await process.spawn(instance.argv(), env=dict(os.environ), stdout=out, stderr=out).wait() == 3
    assert f"cannot start: another agent, process {instance.pid}, holds" in out.read_text()
    assert await instance.director.value(AGENT, "ping") == "pong"


async def test_shutdown_request_stops_the_jobs_and_the_next_agent_stays_idle(instance: RunningAgent) -> None:
    (pid,) = (await instance.deploy(1)).values()

    assert await instance.director.value(AGENT, "shutdown") == ""

    await until(lambda: not Path(f"/proc/{pid}").exists())
    status: int | None = 0
    output = ""
    async with asyncio.timeout(TIMEOUT_S):
        while status == 0:
            status, output = await instance.execute("probe", "ready")
    assert "shut down by the Director" in output
    assert await instance.stop_agent() == 0
    # The backup must record the shutdown too, because the next agent may run in a new container with a new root file
    # system.
    assert (Paths(instance.base).mirror / "shut_down").read_text() == AGENT
    argv = [word.format(config=instance.scratch / "agent.json", base=instance.base) for word in shlex.split(COMMAND)]
    log = instance.scratch / "agent.log"
    instance.agent = process.spawn(argv, env=dict(os.environ), stdout=log, stderr=log)
    await until(lambda: "stays idle until it gets another agent_id" in instance.log_text())
    assert (await instance.execute("probe", "live"))[0] == 0


async def test_s7_start_and_reconnect_send_a_heartbeat_and_update_the_health_file(instance: RunningAgent) -> None:
    monitor = HealthMonitor()
    async with monitor.on(instance.server.peer(HEALTH_MONITOR)):
        await instance.start_agent()
        first = await monitor.wait_for("heartbeat", AGENT)
        assert set(first.body) == {
            *("deployment", "job", "index", "job_state", "vitals", "node_id", "number_of_processes"),
        }
        assert first.body["vitals"]["load"]
        health = instance.base / "instance/health.json"

        async def beat() -> int:
            """Restart the bus and wait for another heartbeat. Return the health file's inode."""
            seen = len(monitor.of("heartbeat", AGENT))
            await instance.server.kill()
            await instance.server.start()
            await until(lambda: len(monitor.of("heartbeat", AGENT)) > seen)
            assert json.loads(health.read_bytes()) == {"state": "running"}
            return health.stat().st_ino

        before = health.stat().st_ino
        assert await beat() == before  # the same inode shows that an unchanged file is not rewritten
        health.write_text("{}")
        assert await beat() != before
        health.unlink()
        await beat()


async def test_s9_only_a_drain_for_shutdown_notifies_the_health_monitor(instance: RunningAgent) -> None:
    monitor = HealthMonitor()
    async with monitor.on(instance.server.peer(HEALTH_MONITOR)):
        await instance.start_agent()
        assert await instance.director.run(AGENT, "drain", "update", {}) == 0
        await monitor.wait_for("heartbeat", AGENT)
        assert monitor.of("shutdown", AGENT) == []

        assert await instance.director.run(AGENT, "drain", "shutdown") == 0

        notice = await monitor.wait_for("shutdown", AGENT)
        assert notice.body is None
        assert len(monitor.of("shutdown", AGENT)) == 1


async def test_s7_heartbeat_contains_instance_state_and_number_of_processes(instance: RunningAgent) -> None:
    monitor = HealthMonitor()
    async with monitor.on(instance.server.peer(HEALTH_MONITOR)):
        await instance.start_agent()
        first = (await monitor.wait_for("heartbeat", AGENT)).body
        spec = instance.spec(2, 0)
        await instance.director.run(AGENT, "apply", spec)
        await instance.run("start")
        await instance.until_running()
        later = []
        for then in ("running", "stopped"):
            await instance.stop_agent()
            await instance.start_agent()
            later.append((await monitor.wait_for("heartbeat", AGENT, heartbeat_with(spec["id"], then))).body)
            await instance.run("stop")

    told = ("deployment", "job", "index", "job_state", "node_id", "number_of_processes")
    assert [first[name] for name in told] == ["", None, None, "running", "", 0]
    assert [[each[name] for name in told] for each in later] == [
        ["bench", "bench", 0, "running", "bench-instance", 2],
        ["bench", "bench", 0, "stopped", "bench-instance", 2],
    ]


def heartbeat_with(node_id: str, job_state: str) -> Callable[[Any], bool]:
    """Return a function that recognizes a heartbeat with ``node_id`` and ``job_state``."""
    return lambda body: (body["node_id"], body["job_state"]) == (node_id, job_state)


DEAF = "trap '' TERM; echo $$ >$pidfile; while :; do sleep 0.1; done"


async def test_agent_exits_with_1_after_an_unclean_stop(instance: RunningAgent) -> None:
    await instance.start_agent()
    deaf = jobs.process(Paths(instance.base), "deaf", DEAF, "exit")
    await instance.deploy(more={"deaf": deaf})

    code, said = await instance.execute("drain", "--timeout", "2")
    assert (code, said.startswith("not clean: ")) == (1, True)
    assert await instance.stop_agent() == 1


async def test_agent_connects_once_the_bus_admits_it(instance: RunningAgent) -> None:
    """Until the bus admits the agent, the readiness probe passes only at the ``boot`` level. A CPI's create_vm waits
    for this level, because the Director admits the agent to the bus only after create_vm has returned.
    """
    port = instance.http = free_address()
    await instance.server.remove_agent(AGENT)
    starting = asyncio.create_task(instance.start_agent())
    await until(lambda: "Authorization Violation" in instance.log_text())
    assert await asyncio.to_thread(readiness, port, "boot") == (200, "booted\n")
    assert await asyncio.to_thread(readiness, port, "agent") == (503, "not connected to the message bus\n")

    await instance.server.add_agent(AGENT)

    assert await starting > 0
    assert await asyncio.to_thread(readiness, port, "agent") == (200, "connected\n")


@pytest.mark.attack("a job searches for the agent's keys and settings")
async def test_no_secret_is_in_logs_arguments_environment_or_world_readable_files(instance: RunningAgent) -> None:
    await instance.start_agent()
    mbus: dict[str, Any] = json.loads((instance.scratch / "settings.json").read_text())["env"]["bosh"]["mbus"]
    key_line = mbus["cert"]["private_key"].splitlines()[3]
    await instance.director.run(AGENT, "update_settings", {"mbus": mbus | {"urls": []}, "trusted_certs": ""})

    proc = Path(f"/proc/{instance.pid}")
    shown = [
        instance.log_text(),
        (proc / "environ").read_text(),
        (proc / "cmdline").read_text(),
        instance.base.as_posix(),
    ]
    assert [text for text in shown if key_line in text] == []
    readable = [
        path
        for path in instance.base.rglob("*")
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077 and key_line.encode() in path.read_bytes()
    ]
    assert readable == []
    assert any(key_line.encode() in path.read_bytes() for path in (instance.base / "bosh").glob("*.json"))

    await instance.kill_agent()
    left = [files.sibling(instance.base / place) for place in ("bosh/tasks.json", "data/bosh/spec.json", "monit/x")]
    for path in left:
        path.write_text("{")
    await instance.start_agent()
    assert [path for path in left if path.exists()] == []


async def test_bosh_agent_accepts_the_flags_that_cpis_pass(instance: RunningAgent) -> None:
    instance.command = COMMAND.replace(
        "-m agent_shim.cli run -C {config}",
        "-c 'import sys; from agent_shim.cli.commands import bosh_agent; sys.exit(bosh_agent(sys.argv[1:]))'"
        " -P ubuntu -M monit -C={config}",
    )
    assert await instance.start_agent() > 0

    status, output = await instance.execute("call", "get_state", "full")

    assert status == 0
    assert json.loads(output)["value"]["agent_id"] == AGENT
    status, output = await instance.execute("call", "nonsense")
    assert (status, "there is no method nonsense" in output) == (2, True)


async def test_new_bus_credentials_from_the_cpi_apply_without_a_restart_if_they_are_valid(
    instance: RunningAgent,
) -> None:
    await instance.start_agent()
    await instance.server.add_agent(AGENT, bootstrap=True, permanent=True)
    source = instance.scratch / "settings.json"
    document = json.loads(source.read_text())
    mbus = instance.server.mbus(AGENT, bootstrap=True)
    cert = document["env"]["bosh"]["mbus"]["cert"]

    source.write_text(json.dumps(document).replace(json.dumps(cert["certificate"]), '"nonsense"'))
    await until(lambda: "the settings have changed" in instance.log_text())
    await until(lambda: "cannot use the new bus credentials" in instance.log_text())
    assert await instance.director.value(AGENT, "ping") == "pong"

    cert |= {"certificate": mbus.certificate, "private_key": mbus.private_key}
    source.write_text(json.dumps(document))
    await until(lambda: instance.log_text().count("connected to the bus") > 1)
    await instance.server.add_agent(AGENT, bootstrap=True, permanent=False)

    assert await instance.director.value(AGENT, "ping") == "pong"


@pytest.mark.slow
async def test_t7_bus_connection_survives_heavy_work(tmp_path: Path) -> None:
    burn = "#!/bin/sh\nend=$(($(date +%s) + 11))\nwhile [ $(date +%s) -lt $end ]; do :; done\n"
    async with NatsServer(tmp_path, ping_interval=2.0) as server, contract_world(tmp_path / "agent") as inside:
        await server.add_agent("agent-1")
        store = Path(inside.agent.settings.current.blobstore.options["blobstore_path"])
        source = jobs.blob(store, archive({"packaging": "head -c 300000000 /dev/zero >$BOSH_INSTALL_TARGET/zeros\n"}))
        async with (
            on_bus(server.mbus("agent-1"), "agent-1", inside.dispatcher.handle) as bus,
            Director(poll=0.1).on(server.peer()) as director,
        ):
            await connected(bus)

            async def run(method: str, *arguments: Any) -> Any:
                return await director.run("agent-1", method, *arguments)

            compiling: tuple[Any, ...] = ("compile_package", source["blobstore_id"], source["sha1"], "zeros", "1", {})
            assert "result" in await run(*compiling)
            await run("apply", jobs.spec(store, {"busy": {"monit": "", "bin/run": burn}}))
            errand = asyncio.create_task(run("run_errand"))
            logs = asyncio.create_task(run("fetch_logs", "job", None))
            while not errand.done():
                assert await director.value("agent-1", "ping", timeout=10) == "pong"
                await asyncio.sleep(0.1)

            assert (await errand)["exit_code"] == 0
            assert "blobstore_id" in await logs
            assert bus.stats.connects == 1


async def test_t11_new_credentials_are_used_reported_and_kept_across_a_restart(instance: RunningAgent) -> None:
    await instance.start_agent()
    await instance.server.add_agent(AGENT, bootstrap=True, permanent=True)
    mbus = instance.server.mbus(AGENT, bootstrap=True)
    cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}

    accepted = await instance.director.value(AGENT, "update_settings", {"mbus": {"cert": cert}})
    async with asyncio.timeout(60):
        while (told := await instance.director.value(AGENT, "get_task", accepted["agent_task_id"])) != "ok":
            assert told == accepted
    await instance.server.add_agent(AGENT, bootstrap=True, permanent=False)
    assert await instance.director.value(AGENT, "ping") == "pong"

    await instance.kill_agent()
    await instance.start_agent()
    assert json.loads((instance.base / "bosh/update_settings.json").read_bytes())["mbus"]["cert"] == cert
