"""State and requests of the supervisor where no process runs; ``integration/test_supervisor.py`` runs jobs."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.host import watchdog
from agent_shim.supervisor.plan import JobFile
from agent_shim.supervisor.service import Event, Service, StopRequest
from agent_shim.supervisor.state import State
from agent_shim.supervisor.supervisor import Supervisor, read_saved

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


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path)
    for path in (paths.supervisor_state, paths.stopped_marker, paths.monit_job, paths.mirror / watchdog.MARKS):
        path.parent.mkdir(parents=True, exist_ok=True)
    return paths


@pytest.fixture
async def supervisor(paths: Paths) -> AsyncIterator[Supervisor]:
    """A supervisor of jobs of which none runs."""
    one = Supervisor(paths, on_event=lambda _: None)
    await one.configure([WEB])
    yield one
    await one.close()


def states(supervisor: Supervisor) -> dict[str, State]:
    return {name: service.state for name, service in supervisor._services.items()}


def saved_states(paths: Paths) -> dict[str, State]:
    saved = read_saved(paths.supervisor_state)
    assert saved is not None
    return {name: record.state for name, record in saved.services.items()}


async def test_the_state_is_saved_for_root_alone(supervisor: Supervisor, paths: Paths) -> None:
    """With each change, and at the end."""
    await supervisor.close()

    assert stat.S_IMODE(paths.supervisor_state.stat().st_mode) == 0o600
    assert saved_states(paths) == dict.fromkeys(("web", "db", "cache"), State.STOPPED)


async def test_a_change_is_saved_soon(supervisor: Supervisor, paths: Paths) -> None:
    for state in (State.STOPPED, State.STUCK):
        supervisor._services["web"].record.state = state
        supervisor._changed()
        saving = supervisor._saving
        assert saving is not None
        await saving
        assert saved_states(paths)["web"] is state


async def test_a_sealed_state_is_not_written_again(supervisor: Supervisor, paths: Paths) -> None:
    """The container ends: what its jobs do then is not what they should do in the next one."""
    supervisor._services["web"].record.state = State.STUCK
    await supervisor.seal()
    supervisor._services["web"].record.state = State.UNMONITORED
    supervisor._changed()
    await supervisor.close()

    assert saved_states(paths)["web"] is State.STUCK


async def test_an_agent_that_was_replaced_writes_nothing(supervisor: Supervisor, paths: Paths) -> None:
    supervisor._services["web"].record.state = State.STUCK
    await supervisor._save()
    supervisor.disown()
    supervisor._services["web"].record.state = State.UNMONITORED
    await supervisor.close()

    assert saved_states(paths)["web"] is State.STUCK


@pytest.mark.parametrize(
    ("incarnation", "root_is_new", "after"),
    [(None, False, State.STUCK), (None, True, State.UNMONITORED), ("of another boot", False, State.UNMONITORED)],
)
async def test_processes_outlive_the_agent_and_not_the_container(
    paths: Paths, incarnation: str | None, root_is_new: bool, after: State
) -> None:
    """A service that could not be stopped has ended with it. Monit files are written again where they are gone."""
    before = Supervisor(paths, on_event=lambda _: None)
    await before.configure([WEB])
    before._services["web"].record.state = State.STUCK
    await before.close()
    if incarnation is not None:
        saved = read_saved(paths.supervisor_state)
        assert saved is not None
        saved.incarnation = incarnation
        paths.supervisor_state.write_bytes(msgspec.json.encode(saved))
    for path in paths.monit_job.iterdir():
        path.unlink()

    supervisor = Supervisor(paths, on_event=lambda _: None)
    try:
        assert await supervisor.recover(root_is_new=root_is_new)
        assert states(supervisor)["web"] is after
        assert bool(list(paths.monit_job.iterdir())) is root_is_new
    finally:
        await supervisor.close()


async def test_without_a_saved_state_nothing_is_recovered(paths: Paths) -> None:
    """Nor from one that is of another version or unreadable."""
    for content in (None, b"", b'{"schema":2,"incarnation":"","is_wanted":false,"files":[],"services":{}}'):
        if content is not None:
            paths.supervisor_state.write_bytes(content)
        supervisor = Supervisor(paths, on_event=lambda _: None)
        assert not await supervisor.recover()
        await supervisor.close()


async def test_services_know_what_they_need_and_what_needs_them(supervisor: Supervisor) -> None:
    def names(services: Any) -> list[str]:
        return [each.name for each in services]

    services = supervisor._services
    assert {name: names(each.prerequisites) for name, each in services.items()} == {
        "web": ["db"],
        "db": ["cache"],
        "cache": [],
    }
    assert {name: names(each.dependants) for name, each in services.items()} == {
        "web": [],
        "db": ["web"],
        "cache": ["db"],
    }


async def test_what_is_stopped_with_a_service_is_started_with_it(supervisor: Supervisor) -> None:
    """And its prerequisites are; services that were stopped before stay so."""
    supervisor.hold()
    for name in ("db", "cache"):
        supervisor._services[name].record.state = State.UNMONITORED
    supervisor._services["web"].record.state = State.DOWN
    for life in supervisor._lives.values():
        life.cancel()

    await supervisor.stop_one("cache")
    taken = {name: each.record.was_taken_along for name, each in supervisor._services.items()}
    assert taken == {"web": True, "db": False, "cache": False}

    for each in supervisor._services.values():
        each.record.state = State.STOPPED
    await supervisor.start_one("CACHE")
    assert states(supervisor) == {"web": State.STARTING, "db": State.STOPPED, "cache": State.STARTING}
    with pytest.raises(ActionError, match="There is no service by that name: other"):
        await supervisor.start_one("other")


@pytest.mark.parametrize(("timeout", "kill_after"), [(300.0, 270.0), (10.0, 8.5), (2.0, 1.0), (0.0, 0.0)])
async def test_what_remains_is_killed_in_time_to_see_it_end(
    supervisor: Supervisor, paths: Paths, monkeypatch: pytest.MonkeyPatch, timeout: float, kill_after: float
) -> None:
    """A tenth of the time of a stop, at most a second and a half, is for that; half of a short one."""
    requests: list[StopRequest] = []
    now = asyncio.get_running_loop().time()
    monkeypatch.setattr(Service, "stop", lambda _, request: requests.append(request))
    monkeypatch.setattr("time.monotonic", lambda: now)

    await supervisor.stop(wait=False, timeout=timeout)

    assert [round(request.by - now, 6) for request in requests] == [kill_after] * 3
    assert all(request.is_one_of_all for request in requests)
    assert paths.stopped_marker.exists()
    assert supervisor.job_state() == "stopped"


async def test_an_obstacle_makes_the_jobs_fail_until_it_is_gone(supervisor: Supervisor, paths: Paths) -> None:
    """A stopped instance stays stopped, and one that starts is starting."""
    for service in supervisor._services.values():
        service.record.state = State.RUNNING
    assert (supervisor.is_held, supervisor.job_state()) == (False, "running")
    supervisor.hold("the disk is missing")
    assert (supervisor.is_held, supervisor.job_state()) == (True, "failing")
    supervisor.resume()
    assert (supervisor.is_held, supervisor.job_state()) == (False, "running")

    supervisor._is_starting = True
    assert supervisor.job_state() == "starting"
    paths.stopped_marker.touch()
    assert supervisor.job_state() == "stopped"
    supervisor._is_starting = False
    supervisor.hold("the disk is missing")
    assert supervisor.job_state() == "stopped"


async def test_an_instance_is_running_once_it_has_settled(supervisor: Supervisor) -> None:
    for service in supervisor._services.values():
        service.record.state = State.RUNNING
    supervisor._settled_at = float("inf")
    assert supervisor.job_state() == "starting"
    supervisor._settled_at = float("-inf")
    assert supervisor.job_state() == "running"


async def test_who_had_to_be_killed_is_named_until_it_is_forgotten(supervisor: Supervisor) -> None:
    supervisor._programs.killed |= {"web", "of another job"}
    assert supervisor.killed == ["web"]

    supervisor.forget_killed()
    assert supervisor.killed == []


async def test_a_service_that_blocked_an_agent_is_read_again_on_request(paths: Paths) -> None:
    """Its mark goes first; the others stay."""
    before = Supervisor(paths, on_event=lambda _: None)
    await before.configure([WEB])
    await before.close()
    marks = paths.mirror / watchdog.MARKS
    watchdog.write_marks(marks, {"web": "its pidfile", "db": "its pidfile"})
    events: list[Event] = []
    supervisor = Supervisor(paths, on_event=events.append)
    try:
        await supervisor.recover()
        assert states(supervisor) == {"web": State.BROKEN, "db": State.BROKEN, "cache": State.STOPPED}
        assert sorted(event.service for event in events) == ["db", "web"]

        await supervisor._trust([supervisor._services["web"], supervisor._services["cache"]])

        assert states(supervisor) == {"web": State.STOPPED, "db": State.BROKEN, "cache": State.STOPPED}
        assert watchdog.read_marks(marks) == {"db": "its pidfile"}
    finally:
        await supervisor.close()


async def test_a_forgotten_job_keeps_its_state(supervisor: Supervisor, paths: Paths) -> None:
    """An apply forgets all jobs and configures them again; monit files are there meanwhile for none."""
    supervisor._services["web"].record.state = State.STUCK
    await supervisor.forget()
    assert (supervisor.count(), supervisor._services, paths.monit_job.exists()) == (0, {}, False)

    await supervisor.configure([WEB])
    supervisor.hold()
    await supervisor.start()
    assert supervisor.count() == 3
    assert paths.monit_job.is_dir()
    assert supervisor.is_wanted
