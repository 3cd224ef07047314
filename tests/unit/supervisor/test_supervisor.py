"""State and requests of the supervisor where no process runs; ``integration/test_supervisor.py`` runs jobs."""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.host import clock, files, proc
from agent_shim.supervisor import plan
from agent_shim.supervisor import supervisor as supervisors
from agent_shim.supervisor.bpm.runner import MemoryKill
from agent_shim.supervisor.ownership import Left
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
    """A supervisor of jobs of which none runs."""
    one = Supervisor(paths, on_event=lambda _: None)
    await one.configure([WEB])
    yield one
    await one.close()


@pytest.fixture
def _changes_unsaved(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A change alone is not saved within the test."""

    def drop() -> None:
        if supervisor._saving is not None:
            supervisor._saving.cancel()
            supervisor._saving = None

    drop()
    monkeypatch.setattr(supervisors, "SAVE_DELAY_S", 3600)
    yield
    drop()


def states(supervisor: Supervisor) -> dict[str, State]:
    return {name: service.state for name, service in supervisor._services.items()}


def saved_states(paths: Paths) -> dict[str, State]:
    saved = read_saved(paths.supervisor_state)
    assert saved is not None
    return {name: record.state for name, record in saved.services.items()}


def retire(supervisor: Supervisor) -> list[asyncio.Task[None]]:
    """Have no service do any work; returns what each was at."""
    return [life for each in supervisor._services.values() if (life := each.retire())]


async def test_the_state_is_saved_for_root_alone(supervisor: Supervisor, paths: Paths) -> None:
    """With each change, and at the end."""
    await supervisor.close()

    assert stat.S_IMODE(paths.supervisor_state.stat().st_mode) == 0o600
    assert saved_states(paths) == dict.fromkeys(("web", "db", "cache"), State.STOPPED)


async def test_the_state_is_saved_at_the_end(supervisor: Supervisor, paths: Paths) -> None:
    """With changes that are no reason to save it before."""
    assert supervisor._saving is not None
    await supervisor._saving
    supervisor._services["web"].record.restarts = 7

    await supervisor.close()

    saved = read_saved(paths.supervisor_state)
    assert saved is not None
    assert saved.services["web"].restarts == 7


async def test_an_end_leaves_no_work_behind(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are released after the lives; nothing is written later."""
    supervisor.hold()
    await supervisor.start()
    lives = [life for each in supervisor._services.values() if (life := each._life)]
    were_over: list[bool] = []
    monkeypatch.setattr(Service, "release", lambda _: were_over.append(all(life.done() for life in lives)))
    supervisor._changed()

    await supervisor.close()

    assert (len(lives), were_over) == (3, [True] * 3)
    assert supervisor._saving is None


async def test_a_plan_is_saved_and_its_rules_are_checked(supervisor: Supervisor, paths: Paths) -> None:
    """Before any request: an agent that ends after an apply finds the jobs again."""
    assert supervisor._checks.plan_changed.is_set()
    assert supervisor._saving is not None
    await supervisor._saving

    saved = read_saved(paths.supervisor_state)
    assert saved is not None
    assert saved.files == [WEB]


async def test_the_incarnation_is_read_again_where_the_kernel_refused_it(supervisor: Supervisor, paths: Paths) -> None:
    """Without it the next agent would take the machine for another one."""
    supervisor._incarnation = ""
    await supervisor._save()

    saved = read_saved(paths.supervisor_state)
    assert saved is not None
    assert saved.incarnation == proc.incarnation() != ""


@pytest.mark.usefixtures("_changes_unsaved")
async def test_a_start_is_saved_before_any_program_runs(supervisor: Supervisor, paths: Paths) -> None:
    """An agent that ends meanwhile has its jobs started by the next one; those that run are none of its."""
    seen: list[str] = []

    async def look() -> None:
        seen.append(supervisor.job_state())

    supervisor.hold()
    for state in (State.RUNNING, State.STOPPED):
        retire(supervisor)
        supervisor._services["web"].record.state = supervisor._services["db"].record.state = State.RUNNING
        supervisor._services["cache"].record.state = state
        await supervisor.start(look)
        cache = State.STARTING if state is State.STOPPED else State.RUNNING
        assert saved_states(paths) == {"web": State.RUNNING, "db": State.RUNNING, "cache": cache}
    assert seen == ["running", "starting"]


async def test_services_that_may_not_start_yet_take_no_turn(paths: Paths) -> None:
    """Each looks for its process before, which may run."""
    checks = (
        f"check process p{n} with pidfile /run/p{n}.pid\n start program '/bin/false'\n group vcap" for n in range(20)
    )
    async with Supervisor(paths, on_event=lambda _: None) as supervisor:
        await supervisor.configure([JobFile("many", "", "\n".join(checks))])
        supervisor.hold()
        await supervisor.start()

        async with asyncio.timeout(30):
            while any(each._life is None for each in supervisor._services.values()):
                await asyncio.sleep(0)


async def test_dependants_take_no_turn_from_what_they_wait_for(paths: Paths) -> None:
    """However many they are, and though their files come first."""
    check = "check process {} with pidfile /run/{}.pid\n start program '/bin/false'\n group vcap\n"
    needing = (check.format(f"p{n}", f"p{n}") + " depends on base" for n in range(20))
    async with Supervisor(paths, on_event=lambda _: None) as supervisor:
        await supervisor.configure([JobFile("many", "", "\n".join([*needing, check.format("base", "base")]))])
        supervisor.hold()
        await supervisor.start()

        assert supervisor._services["base"]._life is not None


async def test_a_start_includes_other_groups_but_not_what_waits_for_its_own(paths: Paths) -> None:
    """The Director asks for its group, manual or not; monit starts the others at its reload."""
    supervisor = Supervisor(paths, on_event=lambda _: None)
    supervisor.hold()
    try:
        await supervisor.configure([OTHERS])
        await supervisor.start()
        assert states(supervisor) == {"manual": State.STARTING, "own": State.STARTING, "own-manual": State.STOPPED}
    finally:
        await supervisor.close()


async def test_jobs_are_wanted_from_a_start_to_a_stop(paths: Paths) -> None:
    """By the next agent as well. Where there are none, nothing is wanted; a stop of the container changes nothing."""
    before, after = (Supervisor(paths, on_event=lambda _: None) for _ in range(2))
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


@pytest.mark.usefixtures("_changes_unsaved")
async def test_an_answered_stop_is_saved(supervisor: Supervisor, paths: Paths) -> None:
    """Now, and not with the next change: the state at the answer."""
    for service in supervisor._services.values():
        service.record.state = State.UNMONITORED

    await supervisor.stop(wait=False)
    assert set(saved_states(paths).values()) <= {State.STOPPING, State.STOPPED}
    await supervisor.stop(wait=True, timeout=60)
    assert set(saved_states(paths).values()) == {State.STOPPED}


async def test_a_start_during_a_stop_leaves_no_marker(
    supervisor: Supervisor, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last request counts."""

    async def save() -> None:
        supervisor._is_wanted = True

    monkeypatch.setattr(supervisor, "_save", save)

    await supervisor.stop(wait=False)

    assert not paths.stopped_marker.exists()


@pytest.mark.parametrize(
    ("begun", "is_caged", "other", "since"),
    [
        (50, False, State.STOPPED, [50]),
        (50, True, State.STOPPED, []),
        (0, False, State.STOPPED, []),
        (50, False, State.RUNNING, []),
    ],
)
async def test_orphans_are_ended_once_every_job_without_a_cgroup_is_stopped(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, begun: int, is_caged: bool, other: State, since: list[int]
) -> None:
    """While a service of another group is up, they may be its own. Remaining ones are named."""
    supervisor = Supervisor(paths, on_event=lambda _: None)
    await supervisor.configure([WEB, OTHERS])
    retire(supervisor)
    swept: list[int] = []

    async def sweep_strays(begun: int, _: float) -> list[Left]:
        swept.append(begun)
        return [Left(9, 90, "web")]

    monkeypatch.setattr(supervisor._programs, "sweep_strays", sweep_strays)
    monkeypatch.setattr(Service, "stop", lambda *_: None)
    for name, start in (("web", begun), ("db", 2 * begun)):
        traces = supervisor._services[name].record.traces
        traces.begun, traces.is_caged = start, is_caged
    supervisor._services["own"].record.state = other
    try:
        if since:
            with pytest.raises(ActionError, match=r"^Stopping services errored: 9 \(web\) cannot be ended$"):
                await supervisor.stop(wait=True)
        else:
            await supervisor.stop(wait=True)
        assert swept == since
    finally:
        supervisor._services["own"].record.state = State.STOPPED
        await supervisor.close()


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


async def test_a_state_torn_by_a_crash_leaves_the_one_before_it(paths: Paths) -> None:
    """A crash tears the last line, and another one the first of the next agent."""
    before = Supervisor(paths, on_event=lambda _: None)
    await before.configure([WEB])
    await before.start()
    await before.close()
    whole = paths.supervisor_state.read_bytes()
    assert whole.count(b"\n") >= 1
    kept = whole.splitlines()[-1]
    for torn in (b"", b"\n" + kept[:50], b"\n" + kept[:-1] + b"\n" + bytes(4096)):
        paths.supervisor_state.write_bytes(whole + torn)
        saved = read_saved(paths.supervisor_state)
        assert saved is not None
        assert msgspec.json.encode(saved) == kept

    paths.supervisor_state.write_bytes(kept + b"\nx" * 20)
    assert read_saved(paths.supervisor_state) is None


async def test_an_unchanged_plan_is_not_made_again(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most starts are restarts; a changed file makes a new one."""
    made: list[object] = []
    real = plan.plan

    def counted(job_files: Any) -> Any:
        made.append(1)
        return real(job_files)

    monkeypatch.setattr(plan, "plan", counted)
    supervisor = Supervisor(paths, on_event=lambda _: None)
    for job_files in ([WEB], [WEB], [OTHERS], [WEB]):
        await supervisor.configure(list(job_files))
    await supervisor.forget()
    await supervisor.configure([WEB])
    await supervisor.close()

    assert len(made) == 4


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
    retire(supervisor)

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


async def test_the_state_is_saved_within_the_block(paths: Paths) -> None:
    """Jobs are wanted after a start only."""
    async with Supervisor(paths, on_event=lambda _: None) as supervisor:
        await supervisor.configure([WEB])
        labels = [label for label, _ in supervisor._programs.ownership.records()]
        assert labels == ["web", "db", "cache"]
        assert not supervisor.is_wanted

    assert saved_states(paths) == dict.fromkeys(labels, State.STOPPED)


async def test_an_instance_is_starting_for_the_settling_time_after_a_start(paths: Paths) -> None:
    supervisor = Supervisor(paths, on_event=lambda _: None, settling=lambda: 3600.0)
    supervisor.hold()
    try:
        await supervisor.configure([])
        assert supervisor.job_state() == "running"
        await supervisor.start()
        assert supervisor.job_state() == "starting"
    finally:
        await supervisor.close()


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


async def test_an_unusable_file_is_told_once(paths: Paths) -> None:
    """And again with another reason."""
    events: list[Event] = []
    supervisor = Supervisor(paths, on_event=events.append)
    try:
        for text in ("check", "check", "nonsense"):
            await supervisor.configure([WEB, JobFile("bad", "", text)])
        assert [(event.service, event.event) for event in events] == [("bad", "Execution failed")] * 2
        assert "nonsense" in events[1].description
    finally:
        await supervisor.close()


async def test_monit_files_are_written_and_removed_one_set_after_the_other(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a slow disk would bring files of a former apply back. The end of the agent waits for them too."""
    calls: list[str] = []
    gate = threading.Event()

    def write(_: Path, job_files: Sequence[JobFile]) -> None:
        calls.append(f"begin {len(job_files)}")
        gate.wait(10)
        calls.append(f"end {len(job_files)}")

    monkeypatch.setattr(supervisors, "write_monit_files", write)
    monkeypatch.setattr(files, "remove_tree", lambda _: calls.append("remove"))
    requests: list[tuple[Callable[[], Awaitable[None]], list[str]]] = [
        (partial(supervisor.configure, [WEB, OTHERS]), ["begin 2", "end 2"]),
        (supervisor.forget, ["remove"]),
        (supervisor.close, []),
    ]
    for request, following in requests:
        await supervisor._monit_files_written()
        calls.clear()
        gate.clear()
        await supervisor.configure([WEB])
        asking = asyncio.ensure_future(request())
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert not asking.done()
        assert calls in ([], ["begin 1"])
        gate.set()
        await asking
        await supervisor._monit_files_written()
        assert calls == ["begin 1", "end 1", *following]


async def test_a_finished_service_is_described(supervisor: Supervisor) -> None:
    assert (await supervisor.finished("WEB")).process.name == "web"


def test_processes_of_bpm_run_as_vcap_in_the_real_tree_alone(tmp_path: Path) -> None:
    """Below another base the agent's own user runs them."""
    for base, user in ((Path("/var/vcap"), "vcap"), (tmp_path, None)):
        assert Supervisor(Paths(base), on_event=lambda _: None).bpm._user == user


async def test_a_bug_in_a_life_ends_the_supervisor(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once; the next agent continues."""

    async def fail(self: Service) -> None:
        raise RuntimeError(f"a bug about {self.name}")

    monkeypatch.setattr(clock, "until_beat", lambda _: 3600)
    supervisor = Supervisor(paths, on_event=lambda _: None)
    await supervisor.configure([WEB])
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0)
    monkeypatch.setattr(Service, "_launch", fail)
    try:
        await supervisor.configure([OTHERS])
        await supervisor.start_one("manual")
        with pytest.raises(RuntimeError, match="a bug about manual"):
            async with asyncio.timeout(30):
                await running
    finally:
        await supervisor.close()


async def test_a_bug_counts_though_its_service_is_forgotten_meanwhile(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its event would wake the work beside the services without a pause."""

    async def fail(self: Service) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Service, "_launch", fail)
    supervisor = Supervisor(paths, on_event=lambda _: None)
    await supervisor.configure([WEB])
    await supervisor.start_one("cache")
    life = supervisor._services["cache"]._life
    assert life is not None
    await asyncio.wait([life])
    await supervisor.forget()

    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(30):
            await supervisor.run()


async def test_output_is_cut_at_each_beat_and_not_between(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills of the kernel are counted then: a later exit has another cause. A life that was cancelled is no bug."""
    trims: list[object] = []
    counts: list[object] = []
    beats = iter((0.0, 0.0))
    monkeypatch.setattr(supervisors, "TRIM_PERIOD_S", 11.0)  # of no other work
    monkeypatch.setattr(clock, "until_beat", lambda period: next(beats, 3600) if period == 11.0 else 3600)

    async def trim() -> None:
        trims.append(1)

    monkeypatch.setattr(supervisor._programs, "trim", trim)
    monkeypatch.setattr(supervisor._kills, "count", lambda: counts.append(1))
    supervisor.hold()
    await supervisor.start_one("cache")
    life = supervisor._services["cache"]._life
    assert life is not None
    life.cancel()
    await asyncio.wait([life])

    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(30):
        while len(trims) < 2:
            await asyncio.sleep(0.001)
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert (len(trims), len(counts)) == (2, 2)
    assert not running.done()
    names = {"memory of bpm processes", "rules", "process descendants", "pidfiles", "output of programs"}
    beside = [task for task in asyncio.all_tasks() if task.get_name() in names]
    assert len(beside) == 5
    running.cancel()
    await asyncio.wait([running])
    await asyncio.wait(beside, timeout=10)
    assert all(task.done() for task in beside)


async def test_processes_of_bpm_above_their_limit_are_killed_at_each_beat(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing wakes before bpm runs a process."""
    events: list[Event] = []
    looks: list[object] = []

    def kill_hogs() -> list[MemoryKill]:
        looks.append(1)
        return [MemoryKill("db", "server", 3 << 20, 1 << 20)]

    beats: list[float] = []

    def until_beat(period: float) -> float:
        beats.append(period)
        return 0.0

    supervisor = Supervisor(paths, on_event=events.append)
    used = asyncio.Event()
    supervisor.bpm = SimpleNamespace(used=used.wait, kill_hogs=kill_hogs)  # type: ignore[assignment]
    monkeypatch.setattr(clock, "until_beat", until_beat)
    watching = asyncio.create_task(supervisor._watch_memory())
    for _ in range(20):
        await asyncio.sleep(0)
    assert (beats, looks) == ([], [])
    used.set()
    async with asyncio.timeout(30):
        while len(beats) < 2 and not watching.done():
            await asyncio.sleep(0)
    watching.cancel()

    assert len(beats) >= 2
    assert len(looks) >= 2
    assert len(events) >= 2
    assert {event.service for event in events} == {"server"}


async def test_checks_of_memory_have_a_share_of_a_processor(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with thousands of processes makes them rarer and not dearer."""
    now, rests = [1000.0], list[float]()

    def kill_hogs() -> list[MemoryKill]:
        now[0] += 0.5
        return []

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) > 2:
            raise asyncio.CancelledError

    async def run(work: Callable[[], object]) -> object:
        return work()

    supervisor = Supervisor(paths, on_event=lambda _: None)
    used = asyncio.Event()
    used.set()
    supervisor.bpm = SimpleNamespace(used=used.wait, kill_hogs=kill_hogs)  # type: ignore[assignment]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("asyncio.sleep", sleep)
    monkeypatch.setattr("asyncio.to_thread", run)
    with pytest.raises(asyncio.CancelledError):
        await supervisor._watch_memory()

    assert rests == [25.0] * 3


async def test_a_kill_is_told_by_the_name_of_its_service(paths: Paths) -> None:
    """That of the monit file, where one has the process."""
    supervisor = Supervisor(paths, on_event=lambda _: None)
    await supervisor.configure([JobFile("web", "", "check process Web with pidfile /run/bpm/web/server.pid\n")])
    try:
        names = [
            supervisor._event_of(MemoryKill("web", process, 3 << 20, 1 << 20)).service
            for process in ("server", "worker")
        ]
        assert names == ["Web", "worker"]
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
