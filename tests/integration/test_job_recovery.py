"""A new container runs the jobs of its predecessor again without a request, or reports the obstacle."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_shim.host import files, process
from agent_shim_demo.director import RpcTimeoutError
from agent_shim_demo.release import archive
from benchmarks.world import AGENT, COMMAND, NETWORKS, World
from benchmarks.world import world as made
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with made(COMMAND) as one:
        yield one


def job(world: World, name: str, pre_start: str = "") -> dict[str, str | bytes]:
    """A job of one process; it and its pre-start write their names to one log on the volume that stays."""
    paths = {"base": world.base, "job": name, "log": world.base / "data/events"}
    script = """#!/bin/sh
case $1 in
start) echo {job} >>{log}; echo $$ >{base}/data/sys/run/{job}/{job}.pid; exec sleep 100000 ;;
stop) kill $(cat {base}/data/sys/run/{job}/{job}.pid) ;;
esac
"""
    monit = """check process {job}
  with pidfile {base}/data/sys/run/{job}/{job}.pid
  start program "{base}/jobs/{job}/bin/ctl start"
  stop program "{base}/jobs/{job}/bin/ctl stop"
  group vcap
"""
    made: dict[str, str | bytes] = {"monit": monit.format(**paths), "bin/ctl": script.format(**paths)}
    if pre_start:
        made["bin/pre-start"] = f"#!/bin/sh\necho 'pre-start {name}' >>{paths['log']}\n{pre_start}\n"
    return made


def spec(world: World, jobs: Mapping[str, Mapping[str, str | bytes]], version: str = "1") -> dict[str, Any]:
    """An apply spec of these jobs, whose templates lie in the blobstore, and one package."""
    contents = {f"{name}/{path}": text for name, job in jobs.items() for path, text in job.items()}
    package = world.blob(f"package-{version}", archive({"content": version}))
    return {
        "deployment": "dep",
        "job": {
            "name": "group",
            "template": next(iter(jobs)),
            "version": version,
            "templates": [{"name": name, "version": version} for name in jobs],
        },
        "index": 0,
        "id": "instance-id",
        "name": "group",
        "az": "z1",
        "networks": NETWORKS,
        "packages": {"tool": {"name": "tool", "version": version, **package}},
        "configuration_hash": version,
        "persistent_disk": 0,
        "rendered_templates_archive": world.blob(f"templates-{version}", archive(contents)),
    }


def events(world: World) -> list[str]:
    path = world.base / "data/events"
    return path.read_text().splitlines() if path.exists() else []


async def deploy(world: World, jobs: Mapping[str, Mapping[str, str | bytes]], *, start: bool = True) -> None:
    """Deploy as the Director does, without pre-start."""
    await world.director.run(AGENT, "apply", spec(world, jobs))
    if start:
        await world.director.run(AGENT, "start")
        await world.until_running()


async def end_container(world: World) -> None:
    """Everything that runs is killed."""
    await world.kill_agent()
    for pid in world.pids().values():
        if found := process.adopt(pid):
            found.send(signal.SIGKILL)
            await found.wait()


def reset_root(world: World) -> None:
    """The volume ``data`` stays."""
    for path in world.base.iterdir():
        if path.name != "data":
            files.remove_tree(path)


async def restart_container(world: World) -> None:
    """In place: a new root file system, and everything that ran is dead."""
    await end_container(world)
    (world.base / "data/events").unlink(missing_ok=True)
    reset_root(world)
    await world.start_agent()


async def state(world: World) -> dict[str, Any]:
    found: dict[str, Any] = await world.director.value(AGENT, "get_state")
    return found


async def in_state(world: World, *job_states: str) -> None:
    """Wait for one of these states of the instance."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await state(world))["job_state"] not in job_states:
            await asyncio.sleep(0.02)


async def until_said(world: World, text: str) -> None:
    """Wait for a line of the log."""
    await until(lambda: (log := world.scratch / "agent.log").exists() and text in log.read_text())


async def snapshot(tree: Path) -> dict[str, int]:
    """When everything below a directory was changed, once nothing changes any more."""
    found: dict[str, int] = {}
    async with asyncio.timeout(TIMEOUT_S):
        while (now := {str(path): path.lstat().st_mtime_ns for path in tree.rglob("*")}) != found:
            found = now
            await asyncio.sleep(0.2)
    return found


async def status(world: World) -> dict[str, Any]:
    """Return the status from ``agent-shim status``."""
    out = world.scratch / "status.json"
    argv = [*shlex.split(COMMAND)[:3], "status", "--json", "-b", str(world.base)]
    out.unlink(missing_ok=True)
    assert await process.spawn(argv, env=dict(os.environ), stdout=out).wait() == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


async def test_started_jobs_run_again_after_their_pre_start(world: World) -> None:
    """Links, files and run directories are back as well, and nothing that the Director compares has changed."""
    await world.start_agent()
    jobs = {"job-web": job(world, "job-web", "sleep 0.2"), "job-worker": job(world, "job-worker", "true")}
    await deploy(world, jobs)
    mbus = json.loads((world.scratch / "settings.json").read_text())["env"]["bosh"]["mbus"]
    await world.director.run(AGENT, "update_settings", {"mbus": mbus, "trusted_certs": "", "blobstores": None})
    before = await state(world)
    stale = world.base / "data/sys/run/job-web/stale"
    stale.touch()
    names = ["update_settings.json", "spec.json"]
    contents = {name: (world.base / "bosh" / name).read_text() for name in names}

    await restart_container(world)

    await in_state(world, "running")
    seen = events(world)
    assert sorted(seen[:2]) == ["pre-start job-web", "pre-start job-worker"]
    assert sorted(seen[2:]) == ["job-web", "job-worker"]
    after = await state(world)
    assert {process["name"] for process in after["processes"]} == {"job-web", "job-worker"}
    for volatile in ("processes", "vitals"):
        before.pop(volatile, None)
        after.pop(volatile, None)
    assert after == before
    assert {name: (world.base / "bosh" / name).read_text() for name in names} == contents
    assert (world.base / "jobs/job-web/packages/tool/content").read_text() == "1"
    assert (world.base / "packages/tool/content").read_text() == "1"
    assert (world.base / "instance/id").read_text() == "instance-id"
    assert sorted(path.name for path in (world.base / "monit/job").iterdir()) == [
        "0000_job-worker.monitrc",
        "0001_job-web.monitrc",
    ]
    assert not stale.exists()


async def test_restart_of_the_agent_runs_no_pre_start(world: World) -> None:
    """Neither before nor after a restart of the container."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web", "true")})
    await restart_container(world)
    await in_state(world, "running")
    assert events(world) == ["pre-start job-web", "job-web"]

    await world.kill_agent()
    await world.start_agent()

    await in_state(world, "running")
    assert events(world) == ["pre-start job-web", "job-web"]


@pytest.mark.parametrize("was_started", [True, False])
async def test_stopped_jobs_stay_stopped_until_they_are_started(world: World, was_started: bool) -> None:
    """Without pre-start: the Director runs that itself."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web", "true")}, start=was_started)
    if was_started:
        await world.director.run(AGENT, "stop")

    await restart_container(world)

    await world.director.run(AGENT, "list_disk")  # a task after the recovery of jobs, if that had begun
    assert (await state(world))["job_state"] == "stopped" or not was_started
    assert events(world) == []
    await world.director.run(AGENT, "start")
    await in_state(world, "running")
    assert events(world) == ["job-web"]


async def test_start_holds_however_soon_the_container_ends(world: World) -> None:
    """An answered request is stored on the volume."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web")})
    await world.director.run(AGENT, "stop")
    await world.director.run(AGENT, "start")

    await restart_container(world)

    await in_state(world, "running")


async def test_agent_that_was_shut_down_stays_idle(world: World) -> None:
    """On a new root file system too."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web")})
    await world.director.value(AGENT, "shutdown")
    await until_said(world, "job-web: emptied, now stopped")
    await end_container(world)
    reset_root(world)

    (world.scratch / "agent.log").unlink()
    starting = asyncio.create_task(world.start_agent())
    await until_said(world, "stays idle until it gets another agent_id")
    starting.cancel()

    assert world.pids() == {}


async def test_failed_pre_start_is_tried_again(world: World) -> None:
    """The instance is failing meanwhile, an alert has the reason, and no job runs."""
    await world.start_agent()
    await deploy(
        world,
        {
            "job-web": job(world, "job-web", f"test -e {world.base}/data/allowed"),
            "job-worker": job(world, "job-worker"),
        },
    )

    await restart_container(world)

    await in_state(world, "failing")
    found = await status(world)
    assert found["warnings"] == [
        "the jobs cannot be started: pre-start: 1 of 1 pre-start scripts failed. Failed Jobs: job-web."
    ]
    assert "job-worker" not in events(world)
    (world.base / "data/allowed").touch()
    await in_state(world, "running")
    assert (await status(world))["warnings"] == []


async def test_director_goes_first(world: World) -> None:
    """A hanging pre-start does not prevent a stop of the jobs; the script is ended."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web", f"echo $$ >{world.base}/data/hanging; exec sleep 1000")})
    await restart_container(world)
    hanging = world.base / "data/hanging"
    await until(lambda: hanging.exists() and hanging.read_text().strip())
    assert (await state(world))["job_state"] == "starting"

    await world.director.run(AGENT, "stop")

    assert (await state(world))["job_state"] == "stopped"
    assert not Path(f"/proc/{hanging.read_text().strip()}").exists()
    await world.director.run(AGENT, "start")
    await in_state(world, "running")
    assert events(world)[-1] == "job-web"


async def test_start_of_the_director_ends_the_waiting(world: World) -> None:
    """It has run pre-start in its own way."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web", "exit 1")})
    await restart_container(world)
    await in_state(world, "failing")

    await world.director.run(AGENT, "start")

    await in_state(world, "running")
    seen = len(events(world))
    await world.kill_agent()
    await world.start_agent()
    await in_state(world, "running")
    assert len(events(world)) == seen


async def test_agent_that_is_killed_in_pre_start_has_it_run_again(world: World) -> None:
    """On the same root file system: the first run may not have come to its end."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web", f"test -e {world.base}/data/seen || exec sleep 1000")})
    await restart_container(world)
    await until(lambda: events(world) == ["pre-start job-web"])

    await world.kill_agent()
    (world.base / "data/seen").touch()
    await world.start_agent()

    await in_state(world, "running")
    assert events(world) == ["pre-start job-web", "pre-start job-web", "job-web"]


@pytest.mark.parametrize("what", ["jobs/job-web", "packages/tool"])
async def test_missing_files_are_reported_and_start_is_refused(world: World, what: str) -> None:
    """A directory in memory, say. The Director's next deployment puts that right."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web")})
    await end_container(world)
    reset_root(world)
    files.remove_tree(world.base / "data" / what)
    await world.start_agent()

    await in_state(world, "failing")

    kind, name = what.split("s/")
    text = f"the files of {kind} {name} are gone, the Director has to apply its spec again"
    assert (await status(world))["warnings"] == [f"the jobs cannot be started: {text}"]
    reply = await world.director.call(AGENT, "start")
    assert reply["exception"]["message"] == f"Action Failed start: Starting Monitored Services: {text}"
    assert world.pids() == {}
    await deploy(world, {"job-web": job(world, "job-web")})


async def test_new_container_of_another_agent_starts_empty(world: World) -> None:
    """On a used volume: nothing of the former one is started, told, or lost."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web")})
    await end_container(world)
    reset_root(world)
    for path in world.base.glob("data/bosh/*.json"):
        path.write_text(path.read_text().replace(f'"{AGENT}"', '"somebody-else"'))
    await world.start_agent()

    await asyncio.sleep(0.3)

    found = await state(world)
    assert (found["deployment"], found["job_state"], "processes" in found) == ("", "running", False)
    assert world.pids() == {}
    assert (world.base / "data/bosh/set_aside/somebody-else/spec.json").exists()


async def test_jobs_without_processes_are_running(world: World) -> None:
    """Empty monit files: there is nothing to run, before and after."""
    await world.start_agent()
    await deploy(world, {"job-web": {"monit": "", "bin/x": "x"}})

    await restart_container(world)

    await in_state(world, "running")
    assert "processes" not in await state(world)


async def test_lost_memory_of_the_supervisor_is_made_up_from_the_spec(world: World) -> None:
    """Never running with no process of those that were started."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web")})
    await end_container(world)
    reset_root(world)
    (world.base / "data/bosh/supervisor.json").write_text("{ half")
    await world.start_agent()

    await in_state(world, "running")

    assert [each["name"] for each in (await state(world))["processes"]] == ["job-web"]
    assert list(world.pids()) == ["job-web"]


async def test_second_agent_on_the_volume_waits_until_the_first_ends(world: World) -> None:
    """A pod that is created again before its predecessor has ended."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web")})
    before = await snapshot(world.base / "data")
    other, log = world.scratch / "other", world.scratch / "other.log"
    other.mkdir()
    (other / "data").symlink_to(world.base / "data")
    argv = [word.format(config=world.scratch / "agent.json", base=other) for word in shlex.split(COMMAND)]
    second = process.spawn(argv, env=dict(os.environ), stdout=log, stderr=log)
    try:
        await until(lambda: "waiting until another agent ends" in log.read_text() if log.exists() else "")
        await asyncio.sleep(0.5)

        assert f"{other}/data is in use by agent {AGENT} on " in log.read_text()
        assert [path.name for path in (other / "bosh").iterdir()] == ["agent_shim.lock"]
        after = await snapshot(world.base / "data")
        changed = {path for path in after.keys() | before.keys() if after.get(path) != before.get(path)}
        assert {Path(path).name for path in changed} <= {"lease.json"}
        assert await world.director.value(AGENT, "ping") == "pong"

        await world.director.value(AGENT, "shutdown")
        await world.stop_agent()
        await until(lambda: "boot step directories" in log.read_text())
    finally:
        await second.terminate(5)


@pytest.mark.slow
async def test_agent_whose_volume_was_taken_ends_its_jobs_and_leaves_the_bus(world: World) -> None:
    """It was taken for dead, as a machine that sleeps for a minute is; the files are those of the other one now."""
    await world.start_agent()
    await deploy(world, {"job-web": job(world, "job-web")})
    await snapshot(world.base / "data")
    (pid,) = world.pids().values()
    lease = world.base / "data/bosh/lease.json"
    taken = json.loads(lease.read_text()) | {"holder": "another", "host": "elsewhere"}
    raw = json.dumps(taken)
    with lease.open("r+") as file:
        file.truncate(0)
        file.write(raw)
    before = await snapshot(world.base / "data/bosh")

    await until_said(world, f"was taken over by agent {AGENT} on elsewhere")

    async with asyncio.timeout(TIMEOUT_S):
        await until(lambda: not Path(f"/proc/{pid}").exists())
        while (found := await status(world))["bus"]["connected"]:
            await asyncio.sleep(0.02)
    assert found["phase"] == f"fenced off: {world.base}/data was taken over by agent {AGENT} on elsewhere"
    with pytest.raises(RpcTimeoutError):
        await world.director.value(AGENT, "ping", timeout=0.5)
    await world.stop_agent()
    assert await snapshot(world.base / "data/bosh") == before
    assert lease.read_text() == raw
    assert not (world.base / "monit/stopped").exists()


def with_more(document: Any) -> Any:
    """The same with one more member in every object, as a later version of the same schema may write."""
    if isinstance(document, dict):
        return {name: with_more(member) for name, member in document.items()} | {"of_a_later_version": [1, {"a": None}]}
    return [with_more(member) for member in document] if isinstance(document, list) else document


async def test_another_version_of_this_agent_takes_over(world: World) -> None:
    """Files of the same schema with members that this version does not know: every process is adopted."""
    await world.start_agent()
    await deploy(world, {"web": job(world, "web"), "db": job(world, "db")})
    before = world.pids()
    await world.stop_agent()
    for path in [*(world.base / "data/bosh").glob("*.json"), world.base / "bosh/agent_shim.json"]:
        document = json.loads(path.read_text().splitlines()[-1])
        if path.name == "supervisor.json":
            document["files"] = [with_more(file) for file in document["files"]]
            document["services"] = {
                name: record | {"of_a_later_version": 1, "traces": record["traces"] | {"of_a_later_version": 1}}
                for name, record in document["services"].items()
            }
            path.write_text(json.dumps(document | {"of_a_later_version": 1}))
        elif "schema" in document:
            path.write_text(json.dumps(with_more(document)))

    await world.start_agent()

    await in_state(world, "running")
    assert world.pids() == before
    assert sorted(events(world)) == ["db", "web"]
