"""The daemon as a process: signals, a second one, settings that come late, shutdown, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shlex
import signal
import stat
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_shim.host import files, process
from agent_shim_demo.director import Director, HealthMonitor
from agent_shim_demo.pki import HEALTH_MONITOR
from agent_shim_demo.release import archive
from benchmarks.idle import free_port
from benchmarks.world import AGENT, COMMAND, World
from benchmarks.world import world as made
from tests.support import jobs
from tests.support.broker import NatsServer
from tests.support.bus import connected, on_bus
from tests.support.waiting import until
from tests.support.world import world as contract_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with made(COMMAND) as one:
        yield one


def log_of(world: World) -> str:
    path = world.scratch / "agent.log"
    return path.read_text() if path.exists() else ""


async def command(world: World, *words: str) -> tuple[int | None, str]:
    """Run an ``agent-shim`` command against this agent: exit code and output."""
    out = world.scratch / "command.out"
    out.unlink(missing_ok=True)
    argv = [*shlex.split(COMMAND)[:3], *words, "-b", str(world.base)]
    status = await process.spawn(argv, env=dict(os.environ), stdout=out, stderr=out).wait()
    return status, out.read_text()


def readiness(address: str, level: str) -> tuple[int, str]:
    """The answer to a probe."""
    try:
        with urllib.request.urlopen(f"http://{address}/readyz?level={level}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


async def test_sigterm_ends_the_agent_with_0_and_leaves_the_jobs(world: World) -> None:
    await world.start_agent()
    await world.director.run(AGENT, "apply", world.spec(2, 0))
    await world.run("start")
    await world.until_running()
    before = world.pids()

    assert world.agent is not None
    world.agent.send(signal.SIGTERM)

    assert await world.agent.wait() == 0
    assert all(Path(f"/proc/{pid}").exists() for pid in before.values())
    await world.start_agent()
    await world.until_running()
    assert world.pids() == before


async def test_the_agent_may_open_more_files_than_its_jobs(world: World) -> None:
    """Jobs get the soft limit of the container, as under the Go agent and monit; a job may have thousands of processes,
    each a descriptor of the agent.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        await world.start_agent()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await world.director.run(AGENT, "apply", world.spec(2, 0))
    await world.run("start")
    await world.until_running()

    assert resource.prlimit(world.pid, resource.RLIMIT_NOFILE) == (hard - 1, hard)
    assert {resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in world.pids().values()} == {(512, hard)}


async def test_a_second_agent_on_the_same_tree_ends_with_3_and_leaves_it_unchanged(world: World) -> None:
    await world.start_agent()
    argv = [word.format(config=world.scratch / "agent.json", base=world.base) for word in shlex.split(COMMAND)]
    out = world.scratch / "second.out"

    second = process.spawn(argv, env=dict(os.environ), stdout=out, stderr=out)

    assert await second.wait() == 3
    assert f"cannot start: another agent, process {world.pid}, holds" in out.read_text()
    assert await world.director.value(AGENT, "ping") == "pong"


async def test_settings_that_come_late_and_in_parts_are_waited_for(world: World) -> None:
    world.write_settings()
    source = world.scratch / "settings.json"
    whole = source.read_text()
    source.write_text(whole[:100])
    starting = asyncio.create_task(world.start_agent())
    await until(lambda: "waiting for it to change" in log_of(world))
    assert (await command(world, "probe", "live"))[0] == 0
    status, output = await command(world, "probe", "ready")
    assert (status, "waiting for settings" in output) == (1, True)

    source.write_text(whole)

    await starting
    assert (await command(world, "probe", "ready"))[0] == 0


async def test_no_agent_answers_69(world: World) -> None:
    status, output = await command(world, "status")

    assert status == 69
    assert "cannot ask the agent at" in output


async def test_wrong_agent_json_ends_with_78(world: World) -> None:
    broken = world.scratch / "broken.json"
    broken.write_text("{")
    out = world.scratch / "out"
    argv = [*shlex.split(COMMAND)[:3], "run", "-C", str(broken), "-b", str(world.base)]

    assert await process.spawn(argv, env=dict(os.environ), stdout=out, stderr=out).wait() == 78
    assert "cannot read the agent's configuration from" in out.read_text()


async def test_bosh_agent_takes_the_flags_that_cpis_pass(world: World) -> None:
    world.command = COMMAND.replace(
        "-m agent_shim.cli run -C {config}",
        "-c 'import sys; from agent_shim.cli.commands import bosh_agent; sys.exit(bosh_agent(sys.argv[1:]))'"
        " -P ubuntu -M monit -C={config}",
    )

    assert await world.start_agent() > 0


async def test_shutdown_stops_the_jobs_and_stays_idle_over_a_restart(world: World) -> None:
    await world.start_agent()
    await world.director.run(AGENT, "apply", world.spec(1, 0))
    await world.run("start")
    await world.until_running()
    (pid,) = world.pids().values()

    assert await world.director.value(AGENT, "shutdown") == ""

    await until(lambda: not Path(f"/proc/{pid}").exists())
    status: int | None = 0
    output = ""
    async with asyncio.timeout(20):
        while status == 0:
            status, output = await command(world, "probe", "ready")
    assert "shut down by the Director" in output
    assert world.agent is not None
    world.agent.send(signal.SIGTERM)
    assert await world.agent.wait() == 0
    argv = [word.format(config=world.scratch / "agent.json", base=world.base) for word in shlex.split(COMMAND)]
    log = world.scratch / "agent.log"
    world.agent = process.spawn(argv, env=dict(os.environ), stdout=log, stderr=log)
    await until(lambda: "stays idle until it gets another agent_id" in log_of(world))
    assert (await command(world, "probe", "live"))[0] == 0


async def test_s7_heartbeat_comes_at_once_and_again_after_the_bus_was_away(world: World) -> None:
    monitor = HealthMonitor()
    async with monitor.on(world.server.peer(HEALTH_MONITOR)):
        await world.start_agent()
        first = await monitor.wait_for("heartbeat", AGENT)
        assert set(first.body) == {
            *("deployment", "job", "index", "job_state", "vitals", "node_id", "number_of_processes"),
        }
        assert first.body["vitals"]["load"]
        health = world.base / "instance/health.json"

        async def beat() -> int:
            """Inode of the health file after a further heartbeat."""
            seen = len(monitor.of("heartbeat", AGENT))
            await world.server.kill()
            await world.server.start()
            await until(lambda: len(monitor.of("heartbeat", AGENT)) > seen)
            assert json.loads(health.read_bytes()) == {"state": "running"}
            return health.stat().st_ino

        before = health.stat().st_ino
        assert await beat() == before  # an unchanged file is not written again
        health.write_text("{}")
        assert await beat() != before
        health.unlink()
        await beat()


async def test_s7_heartbeat_tells_of_the_instance_its_state_and_how_many_processes_it_has(world: World) -> None:
    """Before the first apply nothing is known; afterwards the state is that of the jobs, whatever it is."""
    monitor = HealthMonitor()
    async with monitor.on(world.server.peer(HEALTH_MONITOR)):
        await world.start_agent()
        first = (await monitor.wait_for("heartbeat", AGENT)).body
        spec = world.spec(2, 0)
        await world.director.run(AGENT, "apply", spec)
        await world.run("start")
        await world.until_running()
        later = []
        for then in ("running", "stopped"):
            await world.stop_agent()
            await world.start_agent()
            later.append((await monitor.wait_for("heartbeat", AGENT, told_of(spec["id"], then))).body)
            await world.run("stop")

    told = ("deployment", "job", "index", "job_state", "node_id", "number_of_processes")
    assert [first[name] for name in told] == ["", None, None, "running", "", 0]
    assert [[each[name] for name in told] for each in later] == [
        ["bench", "bench", 0, "running", "bench-instance", 2],
        ["bench", "bench", 0, "stopped", "bench-instance", 2],
    ]


def told_of(node_id: str, job_state: str) -> Callable[[Any], bool]:
    """True if a heartbeat is of this instance in this state."""
    return lambda body: (body["node_id"], body["job_state"]) == (node_id, job_state)


async def test_an_agent_whose_orderly_stop_was_not_clean_ends_with_1(world: World) -> None:
    await world.start_agent()
    pidfile = world.base / "data/sys/run/deaf/deaf.pid"
    ctl = f"""#!/bin/sh
[ $1 = stop ] && exit
trap '' TERM
echo $$ >{pidfile}
while :; do sleep 0.1; done
"""
    program = f"{world.base}/jobs/deaf/bin/ctl"
    monit = f"""check process deaf with pidfile {pidfile}
  start program "{program} start"
  stop program "{program} stop"
  group vcap
"""
    await world.director.run(AGENT, "apply", world.spec(1, 0, more={"deaf": {"monit": monit, "bin/ctl": ctl}}))
    await world.run("start")
    await world.until_running()

    code, said = await command(world, "drain", "--timeout", "2")
    assert (code, said.startswith("not clean: ")) == (1, True)
    assert world.agent is not None
    world.agent.send(signal.SIGTERM)
    assert await world.agent.wait() == 1


async def test_unknown_agent_is_refused_and_comes_up_when_the_server_learns_of_it(world: World) -> None:
    """A Director lets an agent in when create_vm has returned, for which CPIs wait until the agent has booted."""
    port = world.http = await free_port()
    await world.server.remove_agent(AGENT)
    starting = asyncio.create_task(world.start_agent())
    await until(lambda: "Authorization Violation" in log_of(world))
    assert await asyncio.to_thread(readiness, port, "boot") == (200, "booted\n")
    assert await asyncio.to_thread(readiness, port, "agent") == (503, "not connected to the message bus\n")

    await world.server.add_agent(AGENT)

    assert await starting > 0
    assert await asyncio.to_thread(readiness, port, "agent") == (200, "connected\n")


async def test_no_secret_is_in_logs_arguments_environment_or_world_readable_files(world: World) -> None:
    await world.start_agent()
    mbus: dict[str, Any] = json.loads((world.scratch / "settings.json").read_text())["env"]["bosh"]["mbus"]
    key_line = mbus["cert"]["private_key"].splitlines()[3]
    await world.director.run(AGENT, "update_settings", {"mbus": mbus | {"urls": []}, "trusted_certs": ""})

    proc = Path(f"/proc/{world.pid}")
    shown = [log_of(world), (proc / "environ").read_text(), (proc / "cmdline").read_text(), world.base.as_posix()]
    assert [text for text in shown if key_line in text] == []
    readable = [
        path
        for path in world.base.rglob("*")
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077 and key_line.encode() in path.read_bytes()
    ]
    assert readable == []
    assert any(key_line.encode() in path.read_bytes() for path in (world.base / "bosh").glob("*.json"))


async def test_half_written_files_are_removed_at_the_next_start(world: World) -> None:
    """SIGKILL in the middle of a write leaves the new file without its name."""
    await world.start_agent()
    await world.kill_agent()
    left = [files.sibling(world.base / place) for place in ("bosh/tasks.json", "data/bosh/spec.json", "monit/x")]
    for path in left:
        path.write_text("{")

    await world.start_agent()

    assert [path for path in left if path.exists()] == []


async def test_the_agent_leaves_no_core(world: World) -> None:
    """A core file would hold the key of the bus; a job that wants one may still ask for it."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, unlimited if before[1] == resource.RLIM_INFINITY else (before[1],) * 2)
    try:
        await world.start_agent()
        soft, hard = resource.prlimit(world.pid, resource.RLIMIT_CORE)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)

    assert (soft, hard) == (process.CORE_LIMIT_BYTES, before[1])


async def test_the_command_call_sends_a_request_of_the_director(world: World) -> None:
    await world.start_agent()

    status, output = await command(world, "call", "get_state", "full")

    assert status == 0
    assert json.loads(output)["value"]["agent_id"] == AGENT
    status, output = await command(world, "call", "nonsense")
    assert (status, "there is no method nonsense" in output) == (2, True)


@pytest.mark.slow
async def test_settings_with_credentials_that_cannot_be_used_do_not_end_the_agent(world: World) -> None:
    await world.start_agent()
    source = world.scratch / "settings.json"
    document = json.loads(source.read_text())
    document["env"]["bosh"]["mbus"]["cert"]["certificate"] = "nonsense"

    source.write_text(json.dumps(document))

    await until(lambda: "the settings have changed" in log_of(world))
    await until(lambda: "cannot use the new bus credentials" in log_of(world))
    assert await world.director.value(AGENT, "ping") == "pong"


async def test_new_settings_of_the_cpi_are_taken_without_a_restart(world: World) -> None:
    await world.start_agent()
    await world.server.add_agent(AGENT, bootstrap=True, permanent=True)
    source = world.scratch / "settings.json"
    document = json.loads(source.read_text())
    mbus = world.server.mbus(AGENT, bootstrap=True)
    document["env"]["bosh"]["mbus"]["cert"] |= {"certificate": mbus.certificate, "private_key": mbus.private_key}

    source.write_text(json.dumps(document))
    await until(lambda: log_of(world).count("connected to the bus") > 1)
    await world.server.add_agent(AGENT, bootstrap=True, permanent=False)

    assert await world.director.value(AGENT, "ping") == "pong"


@pytest.mark.slow
async def test_t7_the_link_lasts_while_much_is_done(tmp_path: Path) -> None:
    """Five pings of a server that drops who misses two; an errand, a compilation and an archive of logs meanwhile."""
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


async def test_t11_new_credentials_are_used_reported_and_kept_over_a_restart(world: World) -> None:
    await world.start_agent()
    await world.server.add_agent(AGENT, bootstrap=True, permanent=True)
    mbus = world.server.mbus(AGENT, bootstrap=True)
    cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}

    accepted = await world.director.value(AGENT, "update_settings", {"mbus": {"cert": cert}})
    async with asyncio.timeout(60):
        while (told := await world.director.value(AGENT, "get_task", accepted["agent_task_id"])) != "ok":
            assert told == accepted
    await world.server.add_agent(AGENT, bootstrap=True, permanent=False)
    assert await world.director.value(AGENT, "ping") == "pong"

    await world.kill_agent()
    await world.start_agent()
    assert json.loads((world.base / "bosh/update_settings.json").read_bytes())["mbus"]["cert"] == cert


async def test_s9_a_drain_for_shutdown_alone_notifies_the_health_monitor(world: World) -> None:
    monitor = HealthMonitor()
    async with monitor.on(world.server.peer(HEALTH_MONITOR)):
        await world.start_agent()
        assert await world.director.run(AGENT, "drain", "update", {}) == 0
        await monitor.wait_for("heartbeat", AGENT)
        assert monitor.of("shutdown", AGENT) == []

        assert await world.director.run(AGENT, "drain", "shutdown") == 0

        notice = await monitor.wait_for("shutdown", AGENT)
        assert notice.body is None
        assert len(monitor.of("shutdown", AGENT)) == 1
