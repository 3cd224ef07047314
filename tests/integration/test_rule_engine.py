"""Tests the results, alerts and actions of monit rules that are checked in each cycle for real processes."""

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
from tests.support.programs.jobs import JobTree, in_state, info
from tests.support.serving import serving, serving_at
from tests.support.waiting import until

# --- resources --------------------------------------------------------------------------------------------------------


async def test_process_above_a_resource_limit_is_reported_as_failing_and_keeps_running(world: JobTree) -> None:
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


async def test_rules_are_first_checked_one_cycle_after_the_start(world: JobTree) -> None:
    """As under monit, a new process has a full cycle to settle."""
    world.timing = replace(world.timing, cycle=0.5)
    async with world.checking(world.job("web", None, "exit 0", "if memory > 1 kb then alert")) as supervisor:
        await in_state(supervisor, "web", "running")
        await until(lambda: world.told("Resource limit matched"))

        # Allow two ticks of tolerance, because the start time and the current time are both rounded to clock ticks.
        web = proc.stat(info(supervisor, "web").pid)
        assert web is not None
        assert clock.boot_ticks() - web.start_ticks >= world.timing.cycle * clock.TICKS - 2


LATE = (
    "import socket, sys, time; time.sleep(0.5);"
    " s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); time.sleep(600)"
)
"""A program that listens on a socket after half a second."""


async def states_until(supervisor: Supervisor, last: str) -> list[str]:
    """Return the instance's successive states, from ``starting`` to ``last``."""
    states = ["starting"]
    while states[-1] != last:
        await asyncio.sleep(0.01)
        if (state := supervisor.job_state()) != states[-1]:
            states.append(state)
    return states


async def test_process_is_starting_until_its_socket_answers(world: JobTree) -> None:
    """The Director relies on the first "running" that it sees, so connection rules are checked right after the
    start.
    """
    world.timing = replace(world.timing, cycle=60)
    there = world.base / "socket"
    start = f'echo $$ >$pidfile; exec {sys.executable} -S -c "{LATE}" {there}'
    job = world.job("web", start, "kill $(cat $pidfile)", f"if failed unixsocket {there} then alert")
    async with world.checking(job) as supervisor:
        assert await states_until(supervisor, "running") == ["starting", "running"]

        assert there.is_socket()
        assert world.events == []


@pytest.mark.parametrize("is_there", [False, True])
async def test_process_whose_socket_never_answers_is_never_reported_as_running(world: JobTree, is_there: bool) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    world.timing = replace(world.timing, cycle=2)
    there = world.base / "socket"
    rule = f"if failed unixsocket {there} protocol http timeout 1 seconds then alert"
    async with contextlib.AsyncExitStack() as opened:
        if is_there:
            await opened.enter_async_context(serving_at(there, silent))
        job = world.job("web", None, "kill $(cat $pidfile)", rule)
        supervisor = await opened.enter_async_context(world.checking(job))

        assert await states_until(supervisor, "failing") == ["starting", "failing"]


async def test_rules_in_a_changed_monit_file_take_effect(world: JobTree) -> None:
    """If the file had no rules before, the task that checks rules is not running yet."""
    async with world.checking(world.job("web", None, "exit 0")) as supervisor:
        await in_state(supervisor, "web", "running")
        await asyncio.sleep(2 * world.timing.cycle)
        await supervisor.configure([world.job("web", None, "exit 0", "if memory > 1 kb then alert")])

        await until(lambda: world.told("Resource limit matched"))


async def test_total_resource_rules_count_child_processes(world: JobTree) -> None:
    start = "echo $$ >$pidfile; sleep 600 & sleep 600 & sleep 600 & wait"
    job = world.job("web", start, "kill $(cat $pidfile)", "if children = 3 then alert", "if totalmem < 1 Gb then alert")
    async with world.checking(job) as supervisor:
        await in_state(supervisor, "web", "running")
        await until(lambda: len(world.told("Resource limit matched")) == 2)

        reason = info(supervisor, "web").reason
        assert "children of 3 matches" in reason
        assert "totalmemory of" in reason


async def test_cpu_rule_measures_cpu_time_between_cycles(world: JobTree) -> None:
    rule = "if cpu > 5 % then alert"
    jobs = [
        world.job("busy", "echo $$ >$pidfile; while :; do :; done", None, rule),
        world.job("idle", None, None, rule),
    ]
    async with world.checking(*jobs) as supervisor:
        await until(lambda: world.told("Resource limit matched"))

        assert set(world.told("Resource limit matched")) == {("busy", "alert")}
        assert info(supervisor, "idle").process.state == "running"


async def test_restarts_triggered_by_a_rule_count_towards_the_restart_limit(world: JobTree) -> None:
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


async def test_restarted_process_does_not_inherit_failed_checks(world: JobTree) -> None:
    job = world.job("web", None, "kill $(cat $pidfile)", "if memory > 1 kb for 4 cycles then restart")
    async with world.checking(job) as supervisor:
        first = (await in_state(supervisor, "web", "running")).pid
        await until(lambda: info(supervisor, "web").pid not in (0, first))
        second = info(supervisor, "web").pid
        looks = len(world.told("Resource limit matched"))
        await asyncio.sleep(2 * world.timing.cycle)

        assert info(supervisor, "web").pid == second
        assert len(world.told("Resource limit matched")) == looks == 1


async def test_rule_recovery_is_reported_and_runs_its_program(world: JobTree) -> None:
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


async def test_rule_exec_runs_in_each_failing_cycle(world: JobTree) -> None:
    """As under monit, the program runs again in each cycle, even though the alert is sent only once."""
    bad = world.script("web", "bad", 'echo "$MONIT_SERVICE $MONIT_EVENT" >>$log')
    job = world.job("web", None, "exit 0", f'if memory > 1 kb then exec "{bad}"')
    async with world.checking(job):
        await until(lambda: len(world.lines()) >= 3)

        assert world.told("Resource limit matched") == [("web", "exec")]


async def test_rules_for_a_passive_service_only_send_alerts(world: JobTree) -> None:
    job = world.job("web", None, "exit 0", "if memory > 1 kb then stop", "mode passive")
    async with world.checking(job) as supervisor:
        supervisor.services()
        await supervisor.start_one("web")
        await until(lambda: world.told("Resource limit matched"))
        await asyncio.sleep(2 * world.timing.cycle)

        assert info(supervisor, "web").state == "running"
        assert world.told("Resource limit matched") == [("web", "alert")]


async def test_failure_is_cleared_if_its_rule_stops_or_unmonitors_the_service(world: JobTree) -> None:
    jobs = [
        world.job("one", None, "kill $(cat $pidfile)", "if memory > 1 kb then stop"),
        world.job("two", None, "exit 0", "if memory > 1 kb then unmonitor"),
    ]
    async with world.checking(*jobs) as supervisor:
        await in_state(supervisor, "one", "stopped")
        await in_state(supervisor, "two", "unmonitored")

        assert info(supervisor, "one").faults == info(supervisor, "two").faults == ()


# --- connections ------------------------------------------------------------------------------------------------------


async def test_hanging_connection_check_does_not_delay_other_checks(world: JobTree) -> None:
    """A check may wait a minute for a socket that accepts no connection."""
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


async def test_check_result_applies_only_to_the_process_that_was_checked(world: JobTree) -> None:
    """A process is killed during a check that is going to fail. Its successor must not be restarted because of this
    check.
    """
    asked: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = asyncio.Event()
        asked.append(first)
        if len(asked) <= 2:  # The first two connections come from the checks at the start and in the first cycle.
            await reader.read()  # do not answer until the check times out
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        first.set()

    async with contextlib.AsyncExitStack() as opened:
        port = await opened.enter_async_context(serving(serve))
        rule = f"if failed port {port} protocol http timeout 2 seconds then restart"
        job = world.job("web", None, "kill $(cat $pidfile)", rule)
        supervisor = await opened.enter_async_context(world.checking(job))
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


async def test_failing_service_recovers_when_its_port_opens(world: JobTree) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        rule = f"if failed host 127.0.0.1 port {server.getsockname()[1]} for 2 cycles then alert"
        async with world.checking(world.job("web", None, None, rule)) as supervisor:
            await until(lambda: info(supervisor, "web").process.state == "failing")
            server.listen()
            await until(lambda: info(supervisor, "web").process.state == "running")

            assert [each.event for each in world.events] == ["Connection failed", "Connection succeeded"]


# --- other checks -----------------------------------------------------------------------------------------------------


async def test_filesystem_rule_checks_used_space(world: JobTree) -> None:
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


# --- other reports ----------------------------------------------------------------------------------------------------


async def test_out_of_memory_kill_is_distinguished_from_other_kills(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent recognizes an out-of-memory kill by the increase of the container's OOM counter."""
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
            "process is not running: killed by the kernel because memory ran out",
            "process is not running",
        ]


async def test_each_error_in_an_invalid_monit_file_is_reported_once(world: JobTree) -> None:
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
