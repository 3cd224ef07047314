"""An agent in a new container starts the previous container's jobs without a request, or reports why it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.director import RpcTimeoutError
from agent_shim.host import files, process
from tests.support import jobs
from tests.support.instance import AGENT, COMMAND, NETWORKS, RunningAgent
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0
LASTS = "echo $$ >$pidfile; exec sleep 100000"


def job(instance: RunningAgent, name: str, pre_start: str = "") -> dict[str, str | bytes]:
    """Return a job with one process.

    The process and the pre-start script write their names to a log on the data volume, which outlives the container.
    """
    log = instance.base / "data/events"
    made: dict[str, str | bytes] = {**jobs.process(Paths(instance.base), name, f"echo {name} >>{log}; {LASTS}")}
    if pre_start:
        made["bin/pre-start"] = f"#!/bin/sh\necho 'pre-start {name}' >>{log}\n{pre_start}\n"
    return made


def events(instance: RunningAgent) -> list[str]:
    path = instance.base / "data/events"
    return path.read_text().splitlines() if path.exists() else []


async def deploy(
    instance: RunningAgent, files_of: Mapping[str, Mapping[str, str | bytes]], *, start: bool = True
) -> None:
    """Deploy the jobs in ``files_of`` as the Director does, but without running pre-start."""
    spec = jobs.spec(instance.store, files_of, {"tool": {"content": "1"}}, networks=NETWORKS)
    await instance.director.run(AGENT, "apply", spec)
    if start:
        await instance.director.run(AGENT, "start")
        await instance.until_running()


async def end_container(instance: RunningAgent) -> None:
    """Kill the agent and all jobs, as happens when a container exits."""
    await instance.kill_agent()
    for pid in instance.pids().values():
        if found := process.adopt(pid):
            found.send(signal.SIGKILL)
            await found.wait()


def reset_root(instance: RunningAgent) -> None:
    """Replace the root file system, but keep the data volume."""
    for path in instance.base.iterdir():
        if path.name != "data":
            files.remove_tree(path)


async def restart_container(instance: RunningAgent) -> None:
    """Restart the container in place: kill all processes, replace the root file system, and start the agent."""
    await end_container(instance)
    (instance.base / "data/events").unlink(missing_ok=True)
    reset_root(instance)
    await instance.start_agent()


async def state(instance: RunningAgent) -> dict[str, Any]:
    found: dict[str, Any] = await instance.director.value(AGENT, "get_state")
    return found


async def in_state(instance: RunningAgent, *job_states: str) -> None:
    """Wait until the instance is in one of ``job_states``."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await state(instance))["job_state"] not in job_states:
            await asyncio.sleep(0.02)


async def until_logged(instance: RunningAgent, text: str) -> None:
    """Wait until the agent's log contains ``text``."""
    await until(lambda: text in instance.log_text())


async def snapshot(tree: Path) -> dict[str, int]:
    """Wait until the files under a directory no longer change. Return each file's modification time."""
    found: dict[str, int] = {}
    async with asyncio.timeout(TIMEOUT_S):
        while (now := {str(path): path.lstat().st_mtime_ns for path in tree.rglob("*")}) != found:
            found = now
            await asyncio.sleep(0.2)
    return found


async def status(instance: RunningAgent) -> dict[str, Any]:
    """Return the JSON output of ``agent-shim status``."""
    found: dict[str, Any] = json.loads((await instance.execute("status", "--json"))[1])
    return found


async def test_started_jobs_run_again_in_a_new_container_after_pre_start(instance: RunningAgent) -> None:
    await instance.start_agent()
    files_of = {"job-web": job(instance, "job-web", "sleep 0.2"), "job-worker": job(instance, "job-worker", "true")}
    await deploy(instance, files_of)
    mbus = json.loads((instance.scratch / "settings.json").read_text())["env"]["bosh"]["mbus"]
    await instance.director.run(AGENT, "update_settings", {"mbus": mbus, "trusted_certs": "", "blobstores": None})
    before = await state(instance)
    stale = instance.base / "data/sys/run/job-web/stale"
    stale.touch()
    names = ["update_settings.json", "spec.json"]
    contents = {name: (instance.base / "bosh" / name).read_text() for name in names}

    await restart_container(instance)

    await in_state(instance, "running")
    seen = events(instance)
    assert sorted(seen[:2]) == ["pre-start job-web", "pre-start job-worker"]
    assert sorted(seen[2:]) == ["job-web", "job-worker"]
    after = await state(instance)
    assert {process["name"] for process in after["processes"]} == {"job-web", "job-worker"}
    for volatile in ("processes", "vitals"):
        before.pop(volatile, None)
        after.pop(volatile, None)
    assert after == before
    assert {name: (instance.base / "bosh" / name).read_text() for name in names} == contents
    assert (instance.base / "jobs/job-web/packages/tool/content").read_text() == "1"
    assert (instance.base / "packages/tool/content").read_text() == "1"
    assert (instance.base / "instance/id").read_text() == "instance-id"
    assert sorted(path.name for path in (instance.base / "monit/job").iterdir()) == [
        "0000_job-worker.monitrc",
        "0001_job-web.monitrc",
    ]
    assert not stale.exists()

    await instance.kill_agent()
    await instance.start_agent()
    await in_state(instance, "running")
    assert events(instance) == seen, "a restart of the agent runs no pre-start"


@pytest.mark.parametrize("was_started", [True, False])
async def test_stopped_jobs_stay_stopped_in_a_new_container_until_started(
    instance: RunningAgent, was_started: bool
) -> None:
    """A start request is stored before it is answered, so it takes effect even if the container exits immediately
    afterwards.
    """
    await instance.start_agent()
    await deploy(instance, {"job-web": job(instance, "job-web", "true")}, start=was_started)
    if was_started:
        await instance.director.run(AGENT, "stop")

    await restart_container(instance)

    await instance.director.run(AGENT, "list_disk")  # this request would hang during the recovery
    assert (await state(instance))["job_state"] == "stopped" or not was_started
    assert events(instance) == []
    await instance.director.run(AGENT, "start")
    await in_state(instance, "running")
    assert events(instance) == ["job-web"]

    await instance.director.run(AGENT, "stop")
    await instance.director.run(AGENT, "start")
    await restart_container(instance)
    await in_state(instance, "running")


async def test_agent_that_was_shut_down_starts_no_jobs(instance: RunningAgent) -> None:
    await instance.start_agent()
    await deploy(instance, {"job-web": job(instance, "job-web")})
    await instance.director.value(AGENT, "shutdown")
    await until_logged(instance, "job-web: emptied, now stopped")
    await end_container(instance)
    reset_root(instance)

    (instance.scratch / "agent.log").unlink()
    starting = asyncio.create_task(instance.start_agent())
    await until_logged(instance, "stays idle until it gets another agent_id")
    starting.cancel()

    assert instance.pids() == {}


async def test_failed_pre_start_is_retried_until_the_director_starts_the_jobs(instance: RunningAgent) -> None:
    """The Director runs pre-start before it starts the jobs, so its start request succeeds even if the agent's own
    pre-start run has failed.
    """
    allowed = instance.base / "data/allowed"
    await instance.start_agent()
    await deploy(
        instance,
        {"job-web": job(instance, "job-web", f"test -e {allowed}"), "job-worker": job(instance, "job-worker")},
    )

    await restart_container(instance)
    await in_state(instance, "failing")
    found = await status(instance)
    assert found["warnings"] == [
        "the jobs cannot be started: pre-start: 1 of 1 pre-start scripts failed. Failed Jobs: job-web."
    ]
    assert "job-worker" not in events(instance)
    allowed.touch()
    await in_state(instance, "running")
    assert (await status(instance))["warnings"] == []

    allowed.unlink()
    await restart_container(instance)
    await in_state(instance, "failing")
    await instance.director.run(AGENT, "start")
    await in_state(instance, "running")
    seen = len(events(instance))
    await instance.kill_agent()
    await instance.start_agent()
    await in_state(instance, "running")
    assert len(events(instance)) == seen


async def test_hanging_pre_start_is_rerun_by_the_next_agent_and_killed_by_a_stop(instance: RunningAgent) -> None:
    """The next agent must not assume that the first run was complete."""
    hanging, seen = instance.base / "data/hanging", instance.base / "data/seen"
    await instance.start_agent()
    hang = f"echo $$ >{hanging}; test -e {seen} || exec sleep 1000"
    await deploy(instance, {"job-web": job(instance, "job-web", hang)})
    await restart_container(instance)
    await until(lambda: events(instance) == ["pre-start job-web"])
    await until(lambda: hanging.exists() and hanging.read_text().strip())
    first = int(hanging.read_text())
    await instance.kill_agent()
    seen.touch()
    await instance.start_agent()
    await in_state(instance, "running")
    assert events(instance) == ["pre-start job-web", "pre-start job-web", "job-web"]

    seen.unlink()
    hanging.unlink()
    # Kill the rest of the script. If one of its processes survived, the next agent would assume that it is in the same
    # container.
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    await restart_container(instance)
    await until(lambda: hanging.exists() and hanging.read_text().strip())
    assert (await state(instance))["job_state"] == "starting"
    await instance.director.run(AGENT, "stop")
    assert (await state(instance))["job_state"] == "stopped"
    assert not Path(f"/proc/{hanging.read_text().strip()}").exists()
    await instance.director.run(AGENT, "start")
    await in_state(instance, "running")
    assert events(instance)[-1] == "job-web"


@pytest.mark.parametrize("what", ["jobs/job-web", "packages/tool"])
async def test_missing_job_files_are_reported_and_a_start_is_refused(instance: RunningAgent, what: str) -> None:
    """The files may have been on an in-memory file system. The Director's next deployment installs them again."""
    await instance.start_agent()
    await deploy(instance, {"job-web": job(instance, "job-web")})
    await end_container(instance)
    reset_root(instance)
    files.remove_tree(instance.base / "data" / what)
    await instance.start_agent()

    await in_state(instance, "failing")

    kind, name = what.split("s/")
    text = f"the files of {kind} {name} are gone, the Director has to apply its spec again"
    assert (await status(instance))["warnings"] == [f"the jobs cannot be started: {text}"]
    reply = await instance.director.call(AGENT, "start")
    assert reply["exception"]["message"] == f"Action Failed start: Starting Monitored Services: {text}"
    assert instance.pids() == {}
    await deploy(instance, {"job-web": job(instance, "job-web")})


async def test_agent_ignores_jobs_that_another_agent_left_on_the_volume(instance: RunningAgent) -> None:
    await instance.start_agent()
    await deploy(instance, {"job-web": job(instance, "job-web")})
    await end_container(instance)
    reset_root(instance)
    for path in instance.base.glob("data/bosh/*.json"):
        path.write_text(path.read_text().replace(f'"{AGENT}"', '"somebody-else"'))
    await instance.start_agent()

    await asyncio.sleep(0.3)

    found = await state(instance)
    assert (found["deployment"], found["job_state"], "processes" in found) == ("", "running", False)
    assert instance.pids() == {}
    assert (instance.base / "data/bosh/set_aside/somebody-else/spec.json").exists()


async def test_jobs_without_processes_are_reported_as_running_after_recovery(instance: RunningAgent) -> None:
    """An empty monit file means that nothing has to be started."""
    await instance.start_agent()
    await deploy(instance, {"job-web": {"monit": "", "bin/x": "x"}})

    await restart_container(instance)

    await in_state(instance, "running")
    assert "processes" not in await state(instance)


async def test_lost_supervisor_state_is_rebuilt_from_the_spec(instance: RunningAgent) -> None:
    """Without its state file, the supervisor would not know the job, and the agent would report "running" even though
    no process exists.
    """
    await instance.start_agent()
    await deploy(instance, {"job-web": job(instance, "job-web")})
    await end_container(instance)
    reset_root(instance)
    (instance.base / "data/bosh/supervisor.json").write_text("{ half")
    await instance.start_agent()

    await in_state(instance, "running")

    assert [each["name"] for each in (await state(instance))["processes"]] == ["job-web"]
    assert list(instance.pids()) == ["job-web"]


async def test_second_agent_on_the_volume_waits_until_the_first_exits(instance: RunningAgent) -> None:
    """If a pod is recreated while its predecessor is still running, both agents share the volume."""
    await instance.start_agent()
    await deploy(instance, {"job-web": job(instance, "job-web")})
    before = await snapshot(instance.base / "data")
    other, log = instance.scratch / "other", instance.scratch / "other.log"
    other.mkdir()
    (other / "data").symlink_to(instance.base / "data")
    argv = [word.format(config=instance.scratch / "agent.json", base=other) for word in shlex.split(COMMAND)]
    second = process.spawn(argv, env=dict(os.environ), stdout=log, stderr=log)
    try:
        await until(lambda: "waiting until another agent ends" in log.read_text() if log.exists() else "")
        await asyncio.sleep(0.5)

        assert f"{other}/data is in use by agent {AGENT} on " in log.read_text()
        assert [path.name for path in (other / "bosh").iterdir()] == ["agent_shim.lock"]
        after = await snapshot(instance.base / "data")
        changed = {path for path in after.keys() | before.keys() if after.get(path) != before.get(path)}
        assert {Path(path).name for path in changed} <= {"lease.json"}
        assert await instance.director.value(AGENT, "ping") == "pong"

        await instance.director.value(AGENT, "shutdown")
        await instance.stop_agent()
        await until(lambda: "boot step directories" in log.read_text())
    finally:
        await second.terminate(5)


@pytest.mark.slow
async def test_agent_that_lost_its_volume_kills_its_jobs_and_disconnects(instance: RunningAgent) -> None:
    """If an agent was suspended for a minute, another agent may have taken over the volume. The first agent must not
    write to it any more.
    """
    await instance.start_agent()
    await deploy(instance, {"job-web": job(instance, "job-web")})
    await snapshot(instance.base / "data")
    (pid,) = instance.pids().values()
    lease = instance.base / "data/bosh/lease.json"
    taken = json.loads(lease.read_text()) | {"holder": "another", "host": "elsewhere"}
    raw = json.dumps(taken)
    with lease.open("r+") as file:
        file.truncate(0)
        file.write(raw)
    before = await snapshot(instance.base / "data/bosh")

    await until_logged(instance, f"was taken over by agent {AGENT} on elsewhere")

    async with asyncio.timeout(TIMEOUT_S):
        await until(lambda: not Path(f"/proc/{pid}").exists())
        while (found := await status(instance))["bus"]["connected"]:
            await asyncio.sleep(0.02)
    assert found["phase"] == f"fenced off: {instance.base}/data was taken over by agent {AGENT} on elsewhere"
    with pytest.raises(RpcTimeoutError):
        await instance.director.value(AGENT, "ping", timeout=0.5)
    await instance.stop_agent()
    assert await snapshot(instance.base / "data/bosh") == before
    assert lease.read_text() == raw
    assert not (instance.base / "monit/stopped").exists()


def with_more(document: Any) -> Any:
    """Return a copy of the document in which every object has an additional member.

    A later version might add such members without changing the schema number.
    """
    if isinstance(document, dict):
        return {name: with_more(member) for name, member in document.items()} | {"of_a_later_version": [1, {"a": None}]}
    return [with_more(member) for member in document] if isinstance(document, list) else document


async def test_another_agent_version_adopts_all_processes(instance: RunningAgent) -> None:
    await instance.start_agent()
    await deploy(instance, {"web": job(instance, "web"), "db": job(instance, "db")})
    before = instance.pids()
    await instance.stop_agent()
    for path in [*(instance.base / "data/bosh").glob("*.json"), instance.base / "bosh/agent_shim.json"]:
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

    await instance.start_agent()

    await in_state(instance, "running")
    assert instance.pids() == before
    assert sorted(events(instance)) == ["db", "web"]
