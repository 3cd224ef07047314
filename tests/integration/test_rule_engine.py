"""Rules on real processes: findings, alerts and actions, cycle by cycle."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent_shim.host import cgroups, clock, proc, process
from agent_shim.supervisor.supervisor import JobFile, ServiceInfo, Supervisor
from tests.support.programs.jobs import World, in_state, info
from tests.support.waiting import until

# --- resources ------------------------------------------------------------------------------------------------------


async def test_process_that_uses_too_much_is_failing_and_stays(world: World) -> None:
    """An alert once, the state for as long as it lasts, the words of monit for it."""
    job = world.job("web", None, "exit 0", "if memory > 1 kb for 2 cycles then alert", "if children > 50 then alert")
    async with world.checking(job) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        await until(lambda: info(supervisor, "web").process.state == "failing")
        found = info(supervisor, "web")
        await asyncio.sleep(5 * world.timing.cycle)

        assert found.faults == ("Resource limit matched",)
        assert "memory of" in found.reason
        assert supervisor.job_state() == "failing"
        assert info(supervisor, "web").pid == before
        assert world.told("Resource limit matched") == [("web", "alert")]


async def test_first_look_comes_a_cycle_after_the_start(world: World) -> None:
    """monit sleeps after a start too: a young process has time to settle."""
    world.timing = replace(world.timing, cycle=0.5)
    async with world.checking(world.job("web", None, "exit 0", "if memory > 1 kb then alert")) as supervisor:
        await in_state(supervisor, "web", "running")
        await until(lambda: world.told("Resource limit matched"))

        # Each of the two times is known to a tick of the kernel's clock.
        web = proc.stat(info(supervisor, "web").pid)
        assert web is not None
        assert clock.boot_ticks() - web.start_ticks >= world.timing.cycle * clock.TICKS - 2


LATE = (
    "import socket, sys, time; time.sleep(0.5);"
    " s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); time.sleep(600)"
)
"""Program that listens after half a second."""


async def states_until(supervisor: Supervisor, last: str) -> list[str]:
    """The states of the instance that follow each other, from ``starting`` to ``last``."""
    states = ["starting"]
    while states[-1] != last:
        await asyncio.sleep(0.01)
        if (state := supervisor.job_state()) != states[-1]:
            states.append(state)
    return states


async def test_process_is_starting_until_its_socket_answers(world: World) -> None:
    """Long before its first cycle. A Director that sees it running ends its wait."""
    world.timing = replace(world.timing, cycle=60)
    there = world.base / "socket"
    start = f'echo $$ >$pidfile; exec {sys.executable} -S -c "{LATE}" {there}'
    job = world.job("web", start, "kill $(cat $pidfile)", f"if failed unixsocket {there} then alert")
    async with world.checking(job) as supervisor:
        assert await states_until(supervisor, "running") == ["starting", "running"]

        assert there.is_socket()
        assert world.events == []


@pytest.mark.parametrize("is_there", [False, True])
async def test_process_whose_socket_never_answers_is_never_running(world: World, is_there: bool) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    world.timing = replace(world.timing, cycle=2)
    there = world.base / "socket"
    rule = f"if failed unixsocket {there} protocol http timeout 1 seconds then alert"
    async with contextlib.AsyncExitStack() as opened:
        if is_there:
            await opened.enter_async_context(await asyncio.start_unix_server(silent, there))
        job = world.job("web", None, "kill $(cat $pidfile)", rule)
        supervisor = await opened.enter_async_context(world.checking(job))

        assert await states_until(supervisor, "failing") == ["starting", "failing"]


async def test_rules_that_come_with_another_file_are_looked_at(world: World) -> None:
    """Without rules no task wakes up."""
    async with world.checking(world.job("web", None, "exit 0")) as supervisor:
        await in_state(supervisor, "web", "running")
        await asyncio.sleep(2 * world.timing.cycle)
        await supervisor.configure([world.job("web", None, "exit 0", "if memory > 1 kb then alert")])

        await until(lambda: world.told("Resource limit matched"))


async def test_tree_is_counted(world: World) -> None:
    """Children are processes of the service. Its own figures are of the process alone."""
    start = "echo $$ >$pidfile; sleep 600 & sleep 600 & sleep 600 & wait"
    job = world.job("web", start, "kill $(cat $pidfile)", "if children = 3 then alert", "if totalmem < 1 Gb then alert")
    async with world.checking(job) as supervisor:
        await in_state(supervisor, "web", "running")
        await until(lambda: len(world.told("Resource limit matched")) == 2)

        reason = info(supervisor, "web").reason
        assert "children of 3 matches" in reason
        assert "totalmemory of" in reason


async def test_busy_process_is_seen_by_its_processor_time(world: World) -> None:
    """The time between two cycles counts. A process that sleeps uses none."""
    rule = "if cpu > 5 % then alert"
    jobs = [
        world.job("busy", "echo $$ >$pidfile; while :; do :; done", None, rule),
        world.job("idle", None, None, rule),
    ]
    async with world.checking(*jobs) as supervisor:
        await until(lambda: world.told("Resource limit matched"))

        assert set(world.told("Resource limit matched")) == {("busy", "alert")}
        assert info(supervisor, "idle").process.state == "running"


async def test_rule_restarts_and_counts_as_restart(world: World) -> None:
    """Another process, and while no check has seen it whole the service is not called running."""
    statements = ("if memory > 1 kb then restart", "if 2 restarts within 9999 cycles then unmonitor")
    job = world.job("web", "echo start >>$log; echo $$ >$pidfile; exec sleep 600", "kill $(cat $pidfile)", *statements)
    async with world.checking(job) as supervisor:
        first = (await in_state(supervisor, "web", "running")).pid
        said: list[ServiceInfo] = []

        def is_over() -> bool:
            said.append(info(supervisor, "web"))
            return said[-1].state == "unmonitored"

        await until(is_over)

        assert info(supervisor, "web").restarts == 2
        assert len(world.lines()) == 3
        assert world.told("Timeout") == [("web", "unmonitor")]
        assert all(each.process.state != "running" for each in said if each.pid not in (0, first))


async def test_new_process_begins_anew(world: World) -> None:
    """Misses of its predecessor do not count against it."""
    job = world.job("web", None, "kill $(cat $pidfile)", "if memory > 1 kb for 4 cycles then restart")
    async with world.checking(job) as supervisor:
        first = (await in_state(supervisor, "web", "running")).pid
        await until(lambda: info(supervisor, "web").pid not in (0, first))
        second = info(supervisor, "web").pid
        looks = len(world.told("Resource limit matched"))
        await asyncio.sleep(2 * world.timing.cycle)

        assert info(supervisor, "web").pid == second
        assert len(world.told("Resource limit matched")) == looks == 1


async def test_recovery_is_reported_and_acted_on(world: World) -> None:
    """The program of ``else if recovered`` runs, and the service runs well again."""
    start = "echo $$ >$pidfile; sleep 600 & child=$!; echo $child >$log.child; wait $child; exec sleep 600"
    good = world.script("web", "good", "echo good >>$log")
    rule = f'if children > 0 then alert else if recovered for 2 cycles then exec "{good}"'
    async with world.checking(world.job("web", start, "exit 0", rule)) as supervisor:
        await until(lambda: world.told("Resource limit matched"))
        assert info(supervisor, "web").process.state == "failing"
        child = proc.stat(int(Path(f"{world.log}.child").read_text()))
        assert child is not None
        process.send(child.identity, signal.SIGTERM)
        await until(lambda: world.lines() == ["good"])

        assert world.told("Resource limit succeeded") == [("web", "exec")]
        await until(lambda: info(supervisor, "web").process.state == "running")


async def test_exec_runs_at_each_bad_cycle(world: World) -> None:
    """monit does it too. The program may call us and outlives the service."""
    bad = world.script("web", "bad", 'echo "$MONIT_SERVICE $MONIT_EVENT" >>$log')
    job = world.job("web", None, "exit 0", f'if memory > 1 kb then exec "{bad}"')
    async with world.checking(job):
        await until(lambda: len(world.lines()) >= 3)

        assert world.told("Resource limit matched") == [("web", "exec")]


async def test_passive_service_is_only_told_of(world: World) -> None:
    """Nothing is stopped or restarted."""
    job = world.job("web", None, "exit 0", "if memory > 1 kb then stop", "mode passive")
    async with world.checking(job) as supervisor:
        supervisor.services()
        await supervisor.start_one("web")
        await until(lambda: world.told("Resource limit matched"))
        await asyncio.sleep(2 * world.timing.cycle)

        assert info(supervisor, "web").state == "running"
        assert world.told("Resource limit matched") == [("web", "alert")]


async def test_stop_and_unmonitor_end_the_looking(world: World) -> None:
    """The complaint ends with it."""
    jobs = [
        world.job("one", None, "kill $(cat $pidfile)", "if memory > 1 kb then stop"),
        world.job("two", None, "exit 0", "if memory > 1 kb then unmonitor"),
    ]
    async with world.checking(*jobs) as supervisor:
        await in_state(supervisor, "one", "stopped")
        await in_state(supervisor, "two", "unmonitored")

        assert info(supervisor, "one").faults == info(supervisor, "two").faults == ()


# --- connections ----------------------------------------------------------------------------------------------------


async def test_silent_port_is_found_and_a_hung_check_delays_nobody(world: World) -> None:
    """One socket accepts no connection, and its rule has a minute. The rules of others continue meanwhile."""
    with socket.socket(socket.AF_UNIX) as full, socket.socket() as free:
        full.bind(str(world.base / "full.sock"))
        full.listen(0)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                each.connect(str(world.base / "full.sock"))
        jobs = [
            world.job(
                "hung",
                None,
                None,
                f"if failed unixsocket {world.base}/full.sock timeout 60 seconds then alert",
                "if memory > 1 kb then alert",
            ),
            world.job("shut", None, None, f"if failed port {port} then alert"),
        ]
        async with world.checking(*jobs) as supervisor:
            await until(lambda: world.told("Connection failed") and world.told("Resource limit matched"))

            assert world.told("Connection failed") == [("shut", "alert")]
            assert info(supervisor, "hung").faults == ("Resource limit matched",)
            assert "Connection refused" in info(supervisor, "shut").reason
        for each in waiting:
            each.close()


async def test_result_of_a_check_counts_for_the_process_it_began_with(world: World) -> None:
    """A check continues while the process is killed: its successor is not restarted by it, and no second one starts."""
    asked: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = asyncio.Event()
        asked.append(first)
        if len(asked) <= 2:  # of the start, and of the first cycle
            await reader.read()  # silent, until the check gives up
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        first.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    rule = f"if failed port {port} protocol http timeout 2 seconds then restart"
    async with server, world.checking(world.job("web", None, "kill $(cat $pidfile)", rule)) as supervisor:
        await until(lambda: len(asked) == 2)
        await asyncio.sleep(5 * world.timing.cycle)
        assert len(asked) == 2
        before = info(supervisor, "web").pid
        found = proc.stat(before)
        assert found is not None
        process.send(found.identity, signal.SIGKILL)
        await until(lambda: info(supervisor, "web").pid not in (0, before))
        after = info(supervisor, "web").pid
        await until(asked[1].is_set)
        await until(lambda: len(asked) > 5)

        assert info(supervisor, "web").pid == after
        assert world.told("Connection failed") == []


async def test_port_that_opens_ends_the_complaint(world: World) -> None:
    """The service was failing and is running, and good news is an event too."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        rule = f"if failed host 127.0.0.1 port {server.getsockname()[1]} for 2 cycles then alert"
        async with world.checking(world.job("web", None, None, rule)) as supervisor:
            await until(lambda: info(supervisor, "web").process.state == "failing")
            server.listen()
            await until(lambda: info(supervisor, "web").process.state == "running")

            assert [each.event for each in world.events] == ["Connection failed", "Connection succeeded"]


# --- other checks ----------------------------------------------------------------------------------------------------


async def test_filesystem_is_checked(world: World) -> None:
    """Space in use."""
    text = f"""
check device root with path {world.base}
  if space usage > 0 % then alert
  if inode usage > 100 % then alert
  group vcap
check device lost with path {world.base}/absent
  if space usage > 0 % then alert
"""
    async with world.checking(JobFile("data", "", text)) as supervisor:
        await until(lambda: info(supervisor, "root").faults)

        assert info(supervisor, "root").faults == ("Resource limit matched",)
        assert "space of" in info(supervisor, "root").reason
        assert info(supervisor, "lost").faults == ()


# --- other reports ---------------------------------------------------------------------------------------------------


async def test_death_for_want_of_memory_is_reported_as_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the counter of the container has risen. The next death is an ordinary one again."""
    kills = [7]
    monkeypatch.setattr(cgroups, "oom_level", lambda *_: (2, Path("/")))
    monkeypatch.setattr(cgroups, "oom_kills_of", lambda *_: kills[0])
    async with world.checking(world.job("web")) as supervisor:
        for rise in (1, 0):
            kills[0] += rise
            pid = (await in_state(supervisor, "web", "running")).pid
            before = len(world.told("Does not exist"))
            found = proc.stat(pid)
            assert found is not None
            process.send(found.identity, signal.SIGKILL)
            await until(lambda count=before: len(world.told("Does not exist")) > count)  # type: ignore[misc]

        assert [each.description for each in world.events if each.event == "Does not exist"] == [
            "process is not running: the kernel killed it, out of memory",
            "process is not running",
        ]


async def test_file_that_cannot_be_used_is_reported_once(world: World) -> None:
    """The alert has the place and the reason, and comes again for another mistake only."""
    bad = JobFile("bad", "", "check nonsense")
    async with world.checking(bad, world.job("web")) as supervisor:
        found = [(each.service, each.event, each.action) for each in world.events]
        assert found == [("bad", "Execution failed", "alert")]
        assert world.events[0].description.startswith("cannot read bad/monit: line 1 column 15: ")
        await supervisor.forget()
        await supervisor.configure([bad, world.job("web")])
        assert len(world.events) == 1
        await supervisor.configure([JobFile("bad", "", "check other nonsense"), world.job("web")])

        assert [each.service for each in world.events] == ["bad", "bad"]
        assert info(supervisor, "bad").process.state == "failing"
