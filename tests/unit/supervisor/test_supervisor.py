"""Tests the supervisor's requests, reports and saved state. ``integration/test_supervisor.py`` runs real jobs."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.host import clock, proc
from agent_shim.supervisor import plan
from agent_shim.supervisor import supervisor as supervisors
from agent_shim.supervisor.bpm_runner import MemoryKill
from agent_shim.supervisor.monit.ast import JobFile
from agent_shim.supervisor.service import Event, Service, StopRequest
from agent_shim.supervisor.state import State
from agent_shim.supervisor.supervisor import SCHEMA, Supervisor, read_saved
from tests.support.waiting import until

WEB = JobFile(
    "web",
    "",
    """
check process web with pidfile /run/web.pid
  start program "/bin/false"
  depends on db
  group vcap
check process db with pidfile /run/db.pid
  start program "/bin/false"
  depends on cache
  group vcap
check process cache with pidfile /run/cache.pid
  start program "/bin/false"
  group vcap
""",
)


OTHERS = JobFile(
    "others",
    "",
    """
check process manual with pidfile /run/manual.pid
  start program "/bin/false"
  mode manual
  group vcap
check process own with pidfile /run/own.pid
  start program "/bin/false"
  group own
check process own-manual with pidfile /run/own-manual.pid
  start program "/bin/false"
  mode manual
  group own
""",
)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path)
    for path in (paths.supervisor_state, paths.stopped_marker, paths.monit_job):
        path.parent.mkdir(parents=True, exist_ok=True)
    return paths


@pytest.fixture
async def supervisor(paths: Paths) -> AsyncIterator[Supervisor]:
    """Provide a supervisor with three stopped services. It is on hold, so it starts no programs."""
    async with Supervisor(paths, notify=lambda _: None) as one:
        one.hold()
        await one.configure([WEB])
        yield one


def states(supervisor: Supervisor) -> dict[str, str]:
    return {each.process.name: each.state for each in supervisor.services()}


def saved_states(paths: Paths) -> dict[str, State]:
    saved = read_saved(paths.supervisor_state)
    return {} if saved is None else {name: record.state for name, record in saved.services.items()}


# --- saved state ------------------------------------------------------------------------------------------------------


async def test_supervisor_state_is_saved_soon_after_a_change_and_readable_only_by_root(
    supervisor: Supervisor, paths: Paths
) -> None:
    await until(lambda: saved_states(paths) == dict.fromkeys(("web", "db", "cache"), State.STOPPED))
    assert stat.S_IMODE(paths.supervisor_state.stat().st_mode) == 0o600
    saved = read_saved(paths.supervisor_state)
    assert saved is not None
    assert saved.files == [WEB]

    await supervisor.monitor_one("cache")
    await until(lambda: saved_states(paths)["cache"] is State.STARTING)


async def test_supervisor_reads_the_incarnation_again_if_the_first_attempt_failed(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the saved state had no incarnation, the next agent would assume that the container had been restarted."""
    with monkeypatch.context() as patch:
        patch.setattr(proc, "incarnation", lambda: "")
        supervisor = Supervisor(paths, notify=lambda _: None)
    async with supervisor:
        await supervisor.configure([WEB])

    saved = read_saved(paths.supervisor_state)
    assert saved is not None
    assert saved.incarnation == proc.incarnation() != ""


@pytest.mark.parametrize("end", [Supervisor.seal, Supervisor.disown])
async def test_supervisor_state_is_not_saved_after_shutdown_began_or_a_successor_took_over(
    supervisor: Supervisor, paths: Paths, end: Callable[[Supervisor], Awaitable[None] | None]
) -> None:
    await supervisor.start()
    if (ending := end(supervisor)) is not None:
        await ending
    await supervisor.unmonitor()
    await supervisor.close()

    assert states(supervisor) == dict.fromkeys(("web", "db", "cache"), "unmonitored")
    assert saved_states(paths) == dict.fromkeys(("web", "db", "cache"), State.STARTING)


async def test_no_service_is_recovered_from_missing_or_unreadable_supervisor_state(paths: Paths) -> None:
    for content in (None, b"", b'{"schema":2,"incarnation":"","is_wanted":false,"files":[],"services":{}}'):
        if content is not None:
            paths.supervisor_state.write_bytes(content)
        supervisor = Supervisor(paths, notify=lambda _: None)
        assert not await supervisor.recover()
        await supervisor.close()


def test_unfinished_restart_saved_by_version_0_2_0_continues(paths: Paths) -> None:
    """Version 0.2.0 saved an unfinished restart in the ``stopping`` state with ``is_start_due`` set."""
    services = {
        "bounced": {"state": "stopping", "is_start_due": True},
        "stopped": {"state": "stopping", "is_start_due": False},
        "running": {"state": "running", "is_start_due": True},
    }
    document = {"schema": SCHEMA, "incarnation": "", "is_wanted": True, "files": [], "services": services}
    paths.supervisor_state.write_bytes(msgspec.json.encode(document))

    saved = read_saved(paths.supervisor_state)
    assert saved is not None
    found = [(each.state, each.is_start_due) for each in saved.services.values()]
    assert found == [(State.BOUNCING, False), (State.STOPPING, False), (State.RUNNING, False)]


# --- plan -------------------------------------------------------------------------------------------------------------


async def test_plan_is_rebuilt_only_if_the_monit_files_changed(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    real = plan.plan

    def counted(job_files: Any, **options: Any) -> Any:
        made.append(1)
        return real(job_files, **options)

    monkeypatch.setattr(plan, "plan", counted)
    supervisor = Supervisor(paths, notify=lambda _: None)
    for job_files in ([WEB], [WEB], [OTHERS], [WEB]):
        await supervisor.configure(list(job_files))
    await supervisor.forget()
    await supervisor.configure([WEB])
    await supervisor.close()

    assert len(made) == 4


async def test_later_of_two_concurrent_configure_and_forget_calls_takes_effect(
    supervisor: Supervisor, paths: Paths
) -> None:
    await asyncio.gather(supervisor.configure([OTHERS]), supervisor.forget())
    assert (states(supervisor), paths.monit_job.exists()) == ({}, False)

    await asyncio.gather(supervisor.forget(), supervisor.configure([WEB]))
    assert states(supervisor) == dict.fromkeys(("web", "db", "cache"), "stopped")
    assert len(list(paths.monit_job.iterdir())) == 1


async def test_invalid_monit_file_is_reported_once_per_error(paths: Paths) -> None:
    events: list[Event] = []
    async with Supervisor(paths, notify=events.append) as supervisor:
        for text in ("check", "check", "nonsense"):
            await supervisor.configure([WEB, JobFile("bad", "", text)])

    assert [(event.service, event.event) for event in events] == [("bad", "Execution failed")] * 2
    assert "nonsense" in events[1].description


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_start_and_stop_requests_determine_whether_the_supervisor_wants_jobs_to_run(paths: Paths) -> None:
    """A start request without any jobs leaves ``is_wanted`` False. The next agent recovers ``is_wanted`` from the saved
    state, and a stop during container shutdown does not change it.
    """
    before, after = (Supervisor(paths, notify=lambda _: None) for _ in range(2))
    before.hold()
    after.hold()
    wanted = []
    steps: list[Callable[[], Awaitable[object]]] = [
        before.start,
        partial(before.configure, [OTHERS]),
        before.close,
        after.recover,
        partial(after.stop, wait=False),
        after.seal,
        partial(after.stop, wait=False),
    ]
    for step in steps:
        await step()
        wanted.append((before.is_wanted, after.is_wanted))
    await after.close()

    assert wanted == [
        (False, False),
        (True, False),
        (True, False),
        (True, True),
        (True, False),
        (True, False),
        (True, False),
    ]


async def test_start_during_a_stop_leaves_no_stop_marker(supervisor: Supervisor, paths: Paths) -> None:
    stopping = asyncio.create_task(supervisor.stop(wait=False))
    await asyncio.sleep(0)
    await supervisor.start()
    await stopping

    assert not paths.stopped_marker.exists()
    await supervisor.stop(wait=False)
    assert paths.stopped_marker.exists()


@pytest.mark.parametrize(("timeout", "kill_after"), [(300.0, 270.0), (10.0, 8.5), (2.0, 1.0), (0.0, 0.0)])
async def test_remaining_processes_are_killed_before_the_stop_timeout(
    supervisor: Supervisor, paths: Paths, monkeypatch: pytest.MonkeyPatch, timeout: float, kill_after: float
) -> None:
    """A tenth of the stop timeout is reserved for processes to exit after SIGKILL, but at least 1.5 s or half the
    timeout, whichever is shorter.
    """
    requests: list[StopRequest] = []
    now = asyncio.get_running_loop().time()
    monkeypatch.setattr(Service, "stop", lambda _, request: requests.append(request))
    monkeypatch.setattr("time.monotonic", lambda: now)

    await supervisor.stop(wait=False, timeout=timeout)

    assert [round(request.by - now, 6) for request in requests] == [kill_after] * 3
    assert paths.stopped_marker.exists()
    assert supervisor.job_state() == "stopped"


async def test_previously_stopped_services_do_not_start_with_their_prerequisite(
    supervisor: Supervisor,
) -> None:
    await supervisor.start()
    await supervisor.unmonitor_one("db")
    await supervisor.monitor_one("web")
    await supervisor.unmonitor_one("web")
    await supervisor.stop_one("cache")
    await supervisor.finished("cache")
    assert states(supervisor) == dict.fromkeys(("web", "db", "cache"), "stopped")

    await supervisor.start_one("CACHE")
    assert states(supervisor) == {"web": "stopped", "db": "starting", "cache": "starting"}
    with pytest.raises(ActionError, match="There is no service by that name: other"):
        await supervisor.start_one("other")


# --- reports ----------------------------------------------------------------------------------------------------------


async def test_container_shutdown_stops_the_instance_without_writing_a_stop_marker(
    supervisor: Supervisor, paths: Paths
) -> None:
    """Without the marker, the next agent starts the jobs again."""
    await supervisor.start()
    await supervisor.seal()
    await supervisor.stop(wait=True)

    assert (supervisor.job_state(), paths.stopped_marker.exists()) == ("stopped", False)


async def test_program_output_is_truncated_while_the_agent_runs(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "until_beat", lambda period: 0.01 if period == supervisors.TRIM_PERIOD_S else 3600.0)
    path = paths.shim_run / "output/web.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(1 << 20))
    async with Supervisor(paths, notify=lambda _: None) as supervisor:
        running = asyncio.create_task(supervisor.run())
        await until(lambda: path.stat().st_size < 1 << 20)
        running.cancel()
        await asyncio.wait([running])


async def test_instance_is_failing_while_an_obstacle_prevents_the_start_unless_it_is_stopped(paths: Paths) -> None:
    async with Supervisor(paths, notify=lambda _: None) as supervisor:
        assert (supervisor.is_held, supervisor.job_state()) == (False, "running")
        supervisor.hold("the disk is missing")
        assert (supervisor.is_held, supervisor.job_state()) == (True, "failing")
        supervisor.end_hold()
        assert (supervisor.is_held, supervisor.job_state()) == (False, "running")
        await supervisor.stop(wait=True)
        supervisor.hold("the disk is missing")
        assert supervisor.job_state() == "stopped"


async def test_bpm_memory_kill_is_reported_by_service_name(paths: Paths) -> None:
    events: list[Event] = []

    def kill_hogs() -> list[MemoryKill]:
        return [MemoryKill("web", process, 3 << 20, 1 << 20) for process in ("server", "worker")]

    async with Supervisor(paths, notify=events.append) as supervisor:
        used = asyncio.Event()
        supervisor.bpm = SimpleNamespace(used=used.wait, kill_hogs=kill_hogs, started={})  # type: ignore[assignment]
        await supervisor.configure([JobFile("web", "", "check process Web with pidfile /run/bpm/web/server.pid\n")])
        running = asyncio.create_task(supervisor.run())
        used.set()
        await until(lambda: len(events) >= 4)
        running.cancel()
        await asyncio.wait([running])

    assert {event.service for event in events} == {"Web", "worker"}
    text = "out of memory: process server of job web used 3.0 MiB, its limit is 1.0 MiB: it was killed"
    assert events[0] == Event("Web", "Resource limit matched", "restart", text)


async def test_memory_checks_are_limited_to_a_share_of_the_cpu(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a job has thousands of processes, a check takes longer, so checks run less often."""
    looks: list[float] = []

    def kill_hogs() -> list[MemoryKill]:
        looks.append(time.monotonic())
        time.sleep(0.01)
        return []

    monkeypatch.setattr(clock, "until_beat", lambda period: 0.0 if period == supervisors.MEMORY_PERIOD_S else 3600.0)
    async with Supervisor(paths, notify=lambda _: None) as supervisor:
        used = asyncio.Event()
        used.set()
        supervisor.bpm = SimpleNamespace(used=used.wait, kill_hogs=kill_hogs, started={})  # type: ignore[assignment]
        running = asyncio.create_task(supervisor.run())
        await until(lambda: len(looks) >= 2)
        running.cancel()
        await asyncio.wait([running])

    assert looks[1] - looks[0] >= 0.01 / supervisors.MEMORY_SHARE
