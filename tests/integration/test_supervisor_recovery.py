"""After the agent restarts, a new supervisor continues to supervise the jobs without restarting them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agent_shim.core.errors import HostError
from agent_shim.host import files, proc, process, reaper
from agent_shim.supervisor import monit_api
from agent_shim.supervisor.ownership.process_finder import ProcessFinder
from agent_shim.supervisor.ownership.process_record import ProcessRecord
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.supervisor import JobFile, Supervisor
from tests.support.programs import is_alive, kill, number_in
from tests.support.programs.jobs import JobTree, in_state, info, program
from tests.support.waiting import until


async def kill_all(*pids: int) -> None:
    """Kill the processes ``pids``, and wait until they have exited."""
    for pid in pids:
        kill(pid)
    await until(lambda: not any(is_alive(pid) for pid in pids))


def pids(supervisor: Supervisor) -> dict[str, int]:
    return {each.process.name: each.pid for each in supervisor.services()}


async def test_next_agent_adopts_children_and_daemons(world: JobTree) -> None:
    files = [
        world.job("web", "echo $name >>$log; echo $$ >$pidfile; exec sleep 600"),
        world.job("worker", f"echo $name >>$log; {program('fork_twice.py', world.pidfile('worker'))}"),
    ]
    async with world.supervising(*files) as supervisor:
        await in_state(supervisor, "web", "running")
        await in_state(supervisor, "worker", "running")
        before = pids(supervisor)
    async with world.supervisor() as supervisor:
        await supervisor.recover()

        assert supervisor.job_state() == "running"
        assert pids(supervisor) == before
        await asyncio.sleep(0.1)
        assert sorted(world.lines()) == ["web", "worker"]
        assert world.events == []


async def killed_agent(world: JobTree, *files: JobFile) -> dict[str, int]:
    """Start the jobs with an agent in another process, then kill that agent with SIGKILL.

    Return the pid of each job's process.
    """
    (world.base / "files.json").write_bytes(msgspec.json.encode(files))
    agent = process.spawn(
        [sys.executable, "-m", "tests.support.programs.agent", str(world.base)],
        env={"TEST_OF": str(world.base)},
        cwd=Path.cwd(),
        stdout=world.base / "agent.log",
        stderr=world.base / "agent.log",
    )
    before = {file.job: await until(partial(number_in, world.pidfile(file.job))) for file in files}
    agent.send(signal.SIGKILL)
    await agent.wait()
    assert all(is_alive(pid) for pid in before.values())
    return before


async def test_killed_agent_does_not_affect_jobs(world: JobTree) -> None:
    with reaper.reaping():
        before = await killed_agent(world, world.job("a"), world.job("b"), world.job("c"))
        async with world.supervisor() as supervisor:
            await supervisor.recover()
            for name in "abc":
                await in_state(supervisor, name, "running")
            assert pids(supervisor) == before
            kill(before["a"])
            await until(lambda: pids(supervisor)["a"] not in (0, before["a"]))

            assert info(supervisor, "a").last_exit == "SIGKILL"


async def test_process_that_died_while_no_agent_ran_is_restarted(world: JobTree) -> None:
    async with world.supervising(world.job("web"), world.job("worker")) as supervisor:
        await in_state(supervisor, "web", "running")
        await in_state(supervisor, "worker", "running")
        before = pids(supervisor)
    await kill_all(before["web"])
    async with world.supervisor() as supervisor:
        await supervisor.recover()
        await in_state(supervisor, "web", "settling")

        assert pids(supervisor)["worker"] == before["worker"]
        assert info(supervisor, "web").restarts == 1
        assert world.events[0].event == "Does not exist"


async def test_running_start_program_is_not_started_again_by_the_next_agent(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = asyncio.Event()
    real = ProcessFinder.arrival

    async def arrival(finder: ProcessFinder, spec: ProcessSpec, record: ProcessRecord) -> None:
        waits.set()
        await real(finder, spec, record)

    start = f"echo once >>$log; while [ ! -e $log.go ]; do sleep 0.01; done; {program('fork_twice.py', '$pidfile')}"
    async with world.supervising(world.job("web", start, timeout=60)) as supervisor:
        await until(world.lines)
        await asyncio.sleep(0.1)
        assert info(supervisor, "web").state == "starting"
    with reaper.reaping():
        async with world.supervisor() as supervisor:
            monkeypatch.setattr(ProcessFinder, "arrival", arrival)
            await supervisor.recover()
            assert info(supervisor, "web").state == "starting"
            await waits.wait()
            Path(f"{world.log}.go").touch()
            await in_state(supervisor, "web", "running")

            assert world.lines() == ["once"]


@pytest.mark.parametrize(("request_", "state"), [("stop", "stopped"), ("restart", "running")])
async def test_interrupted_stop_is_completed_by_the_next_agent(world: JobTree, request_: str, state: str) -> None:
    async with world.supervising(world.job("web", None, "sleep 0.1; kill $(cat $pidfile)")) as supervisor:
        found = await in_state(supervisor, "web", "running")
        await (supervisor.stop(wait=False) if request_ == "stop" else supervisor.restart_one("web"))
        assert info(supervisor, "web").state == "stopping"
    async with world.supervisor() as supervisor:
        await supervisor.recover()
        again = await in_state(supervisor, "web", state)

        assert again.pid != found.pid
        assert not is_alive(found.pid)


async def test_unmonitored_process_stays_unmonitored_under_the_next_agent(world: JobTree) -> None:
    """The Director unmonitors the processes before a drain. A restart of the agent must not undo this."""
    async with world.supervising(world.job("web")) as supervisor:
        found = await in_state(supervisor, "web", "running")
        await supervisor.unmonitor()
    async with world.supervisor() as supervisor:
        await supervisor.recover()

        assert info(supervisor, "web").state == "unmonitored"
        await supervisor.stop(wait=True)
        assert not is_alive(found.pid)


async def test_settling_period_continues_under_the_next_agent(world: JobTree) -> None:
    """A process that has just crashed and been restarted must not be reported as running just because the agent was
    restarted as well.
    """
    world.timing = replace(world.timing, settle=600)
    async with world.supervising(world.job("web")) as supervisor:
        kill((await in_state(supervisor, "web", "running")).pid)
        found = await in_state(supervisor, "web", "settling")
    async with world.supervisor() as supervisor:
        await supervisor.recover()

        assert info(supervisor, "web").state == "settling"
        assert pids(supervisor) == {"web": found.pid}


async def test_new_container_ignores_saved_pids_when_it_starts_the_jobs(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes may happen to have the saved pids."""
    world.timing = replace(world.timing, settle=600)
    async with world.supervising(world.job("web")) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
    await kill_all(before)
    stranger = process.spawn(["/bin/sleep", "600"], env={"TEST_OF": str(world.base)})
    raw = msgspec.json.decode((world.paths.supervisor_state).read_bytes().splitlines()[-1])
    record = raw["services"]["web"]
    record["state"] = "running"
    record["traces"] |= {"known": stranger.identity, "sessions": [[os.getsid(0), 0]]}
    (world.paths.supervisor_state).write_bytes(msgspec.json.encode(raw))
    world.pidfile("web").write_text(f"{stranger.pid}\n")
    monkeypatch.setattr(proc, "incarnation", lambda: "another")
    async with world.supervisor() as supervisor:
        await supervisor.recover()
        found = await in_state(supervisor, "web", "running")
        assert found.pid not in (0, stranger.pid)
        assert found.restarts == 0
        await supervisor.stop(wait=True)

        assert stranger.is_alive


@pytest.mark.parametrize("then", ["resume", "stop"])
async def test_supervisor_starts_no_process_while_it_is_on_hold(
    world: JobTree, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    async with world.supervising(world.job("web"), world.job("worker")) as supervisor:
        await in_state(supervisor, "web", "running")
        await in_state(supervisor, "worker", "running")
        before = pids(supervisor)
    await kill_all(*before.values())
    for name in before:
        world.pidfile(name).unlink()
    monkeypatch.setattr(proc, "incarnation", lambda: "another")
    async with world.supervisor() as supervisor:
        supervisor.hold()
        assert await supervisor.recover()
        await asyncio.sleep(0.1)
        assert (supervisor.job_state(), supervisor.is_held, supervisor.is_wanted) == ("starting", True, True)
        supervisor.hold("the disk is not there")
        assert supervisor.job_state() == "failing"
        assert not world.pidfile("web").exists()

        if then == "stop":
            await supervisor.stop(wait=True)
            assert supervisor.job_state() == "stopped"
        supervisor.end_hold()

        if then == "stop":
            await asyncio.sleep(0.1)
            assert supervisor.job_state() == "stopped"
            assert not world.pidfile("web").exists()
        else:
            await in_state(supervisor, "web", "running")
            await in_state(supervisor, "worker", "running")
            assert supervisor.job_state() == "running"


async def test_supervisor_on_hold_adopts_running_processes(world: JobTree) -> None:
    async with world.supervising(world.job("web"), world.job("worker")) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        worker = (await in_state(supervisor, "worker", "running")).pid
    await kill_all(worker)
    async with world.supervisor() as supervisor:
        supervisor.hold()
        await supervisor.recover()
        await asyncio.sleep(0.1)

        assert info(supervisor, "web").state == "running"
        assert pids(supervisor) == {"web": before, "worker": 0}


async def test_new_container_with_the_same_pids_is_recognized(world: JobTree) -> None:
    """A pod's containers may use the same pids, so only the new root file system shows that the container is
    new.
    """
    world.timing = replace(world.timing, settle=600)
    async with world.supervising(world.job("web")) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
    await kill_all(before)
    for path in world.paths.monit_job.iterdir():
        path.unlink()
    async with world.supervisor() as supervisor:
        await supervisor.recover(root_is_new=True)

        await in_state(supervisor, "web", "running")
        assert info(supervisor, "web").restarts == 0
        assert [path.name for path in world.paths.monit_job.iterdir()] == ["0000_web.monitrc"]


async def test_running_processes_are_adopted_even_if_the_supervisor_state_is_unreadable(world: JobTree) -> None:
    """The keepers know which job the processes belong to."""
    with reaper.reaping():
        before = await killed_agent(world, world.job("web"))
        (world.paths.supervisor_state).write_text("{ half")
        async with world.supervisor() as supervisor:
            await supervisor.recover()
            await supervisor.configure([world.job("web", "exit 1")])
            await supervisor.start()

            assert (await in_state(supervisor, "web", "running")).pid == before["web"]


async def test_process_known_only_to_its_keeper_is_killed_before_the_next_start(world: JobTree) -> None:
    """The agent was killed before it saved the first start, and the process had not written its pidfile yet."""
    with reaper.reaping():
        before = await killed_agent(world, world.job("web"))
        world.paths.supervisor_state.unlink()
        world.pidfile("web").unlink()
        async with world.supervisor() as supervisor:
            await supervisor.recover()
            await supervisor.configure([world.job("web")])
            await supervisor.start()
            after = (await in_state(supervisor, "web", "running")).pid

            assert after != before["web"]
            assert not is_alive(before["web"])


@contextlib.contextmanager
def unwritable(directory: Path) -> Iterator[None]:
    """Make writes to a directory fail, even for root, as if the disk were full."""
    aside = directory.rename(directory.with_name(f"{directory.name}.aside"))
    directory.touch()
    try:
        yield
    finally:
        directory.unlink()
        aside.rename(directory)


async def test_stop_that_could_not_be_saved_survives_a_restart(world: JobTree) -> None:
    """The saved state says that the job is running, but the marker file shows the next agent that it was stopped."""
    async with world.supervising(world.job("web"), world.job("other", None, "exit 1", group="group x")) as supervisor:
        before = {name: (await in_state(supervisor, name, "running")).pid for name in ("web", "other")}
        with unwritable(world.paths.mirror):
            await supervisor.stop(wait=True)
            await supervisor.close()
    assert not is_alive(before["web"])
    raw = msgspec.json.decode(world.paths.supervisor_state.read_bytes())
    raw["is_wanted"], raw["services"]["web"]["state"] = True, "running"
    world.paths.supervisor_state.write_bytes(msgspec.json.encode(raw))
    async with world.supervisor() as supervisor:
        await supervisor.recover()
        await in_state(supervisor, "web", "stopped")
        await asyncio.sleep(0.2)

        assert supervisor.job_state() == "stopped"
        assert not supervisor.is_wanted
        assert pids(supervisor) == {"web": 0, "other": before["other"]}


async def test_next_agent_completes_a_stop_if_only_its_marker_was_written(world: JobTree) -> None:
    """The agent was killed during a stop, right after it had written the marker file."""
    async with world.supervising(world.job("web")) as supervisor:
        found = await in_state(supervisor, "web", "running")
    world.paths.stopped_marker.touch()
    async with world.supervisor() as supervisor:
        await supervisor.recover()
        await in_state(supervisor, "web", "stopped")

    assert not is_alive(found.pid)


async def test_stop_that_cannot_be_recorded_fails(world: JobTree) -> None:
    """If the state cannot be saved, the marker file usually keeps the jobs stopped. However, for a service that was
    started after an earlier stop, the marker file already exists and proves nothing, so the state must be saved.
    """
    async with world.supervising(world.job("web")) as supervisor:
        await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True)
        await supervisor.start_one("web")
        found = await in_state(supervisor, "web", "running")
        await supervisor.saved()
        with unwritable(world.paths.mirror):
            with pytest.raises(HostError, match=r"cannot write .*supervisor\.json"):
                await supervisor.stop(wait=True)
            assert not is_alive(found.pid)
        await supervisor.stop(wait=True)


async def test_start_that_cannot_be_saved_fails_and_starts_nothing(world: JobTree) -> None:
    async with world.supervising(world.job("web")) as supervisor:
        await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True)
        with unwritable(world.paths.mirror):
            with pytest.raises(HostError, match=r"cannot write .*supervisor\.json"):
                await supervisor.start()
            assert (supervisor.job_state(), supervisor.is_wanted) == ("stopped", False)
        await supervisor.start()

        await in_state(supervisor, "web", "running")


async def test_operator_request_that_cannot_be_saved_is_reported(world: JobTree) -> None:
    async with world.supervising(world.job("web")) as supervisor:
        await in_state(supervisor, "web", "running")
        with unwritable(world.paths.mirror):
            answer = await monit_api.answer(supervisor, {"action": "stop", "names": ["web"]}, obstacle="")

        assert "cannot write" in answer["exception"]["message"]


async def test_supervisor_state_that_could_not_be_saved_is_saved_later(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_shim.supervisor.supervisor.SAVE_RETRY_S", 0.05)
    async with world.supervising(world.job("web")) as supervisor:
        await in_state(supervisor, "web", "running")
        with unwritable(world.paths.mirror):
            await supervisor.unmonitor()
            await asyncio.sleep(0.2)

        await until(lambda: b'"state":"unmonitored"' in world.paths.supervisor_state.read_bytes())


async def test_stop_program_runs_only_after_the_stop_is_saved(world: JobTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the stop program ran first and the agent were killed before the save, the next agent would restart the process
    as if it had crashed.
    """
    at_save: list[str] = []
    real = files.write_atomic

    def write(path: Path, *arguments: Any, **options: Any) -> None:
        if path == world.paths.supervisor_state and b'"stopping"' in arguments[0]:
            time.sleep(0.3)
            at_save.extend(world.lines())
        real(path, *arguments, **options)

    async with world.supervising(world.job("web", None, "echo stop >>$log; kill $(cat $pidfile)")) as supervisor:
        await in_state(supervisor, "web", "running")
        monkeypatch.setattr(files, "write_atomic", write)
        await supervisor.stop(wait=True)

    assert at_save == []
    assert world.lines() == ["stop"]
