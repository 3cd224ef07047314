"""Tests a single service: exits, restarts, dependents, rules about a missing process, and file and host checks."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent_shim.host import proc, process
from agent_shim.supervisor.supervisor import JobFile, Supervisor
from tests.support.programs import foreign, is_alive, kill, number_in
from tests.support.programs.jobs import LASTING, JobTree, in_state, info, program
from tests.support.waiting import until

COUNTED = f"echo start $name >>$log; echo $$ >$pidfile; {LASTING}"
STOP = "echo stop $name >>$log; kill $(cat $pidfile)"


async def kill_and_await_successor(supervisor: Supervisor, name: str) -> int:
    """Kill a service's process, and wait for its successor. Return the successor's pid."""
    before = (await in_state(supervisor, name, "running")).pid
    kill(before)
    await until(lambda: info(supervisor, name).pid not in (0, before))
    return info(supervisor, name).pid


# --- exit and restart -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [None, program("fork_twice.py", "$pidfile")], ids=["a child", "forked twice"])
async def test_killed_process_is_restarted_immediately_and_its_exit_status_is_reported(
    world: JobTree, start: str | None
) -> None:
    """All polling intervals are ten minutes in this test, so a restart that depends on polling would come too late."""
    world.timing = replace(world.timing, backoff_first=600, look=600, settle=600)
    async with world.supervising(world.job("web", start)) as supervisor:
        pid = await kill_and_await_successor(supervisor, "web")

        assert is_alive(pid)
        assert info(supervisor, "web").restarts == 1
        assert info(supervisor, "web").last_exit == "SIGKILL"
        assert info(supervisor, "web").exits == {"signal": 1}
        assert [(e.event, e.action, e.description) for e in world.events] == [
            ("Does not exist", "restart", "process is not running")
        ]


TWO_DAEMONS = f"""
echo start >>$log
sleep 600 & echo $! >$pidfile
until [ -e $pidfile.ready ]; do sleep 0.02; done
kill $!; wait $!
until [ -e $pidfile.next ]; do sleep 0.02; done
echo initialized >>$log
{LASTING} & echo $! >$pidfile
"""
"""A start program that starts a daemon, configures it, stops it, and starts the final one, as mongodb_config in
ap-mongodb-shard-release does.
"""


async def test_start_program_that_replaces_its_first_daemon_is_not_interrupted(world: JobTree) -> None:
    world.timing = replace(world.timing, cycle=600)
    async with world.supervising(world.job("web", TWO_DAEMONS)) as supervisor:
        first = (await in_state(supervisor, "web", "running")).pid
        Path(f"{world.pidfile('web')}.ready").touch()
        await until(lambda: not is_alive(first))
        await until(lambda: info(supervisor, "web").process.state == "failing")
        Path(f"{world.pidfile('web')}.next").touch()
        await until(lambda: info(supervisor, "web").pid not in (0, first))

        assert info(supervisor, "web").process.state == "running"
        assert world.lines() == ["start", "initialized"]
        assert info(supervisor, "web").restarts == 0


SLOW_DAEMON = f"""
echo start >>$log
echo $$ >$pidfile
sh -c 'until [ -e $0.next ]; do sleep 0.02; done; echo $$ >$0; {LASTING}' $pidfile &
until [ -e $pidfile.ready ]; do sleep 0.02; done
"""
"""A start program that writes its own pid and exits. Its child writes the final pid later. nginx in
shared-redis-release's broker-nginx behaves like this.
"""


async def test_daemon_may_write_its_pid_long_after_its_parent_has_exited(world: JobTree) -> None:
    """On a busy machine, the pid may be written seconds later. The agent waits, because the keeper reports a running
    process.
    """
    world.timing = replace(world.timing, cycle=600)
    async with world.supervising(world.job("web", SLOW_DAEMON)) as supervisor:
        first = (await in_state(supervisor, "web", "running")).pid
        Path(f"{world.pidfile('web')}.ready").touch()
        await until(lambda: not is_alive(first))
        await asyncio.sleep(2 * world.timing.linger)
        Path(f"{world.pidfile('web')}.next").touch()
        await until(lambda: info(supervisor, "web").pid not in (0, first))

        assert world.lines() == ["start"]
        assert (info(supervisor, "web").restarts, world.events) == (0, [])


async def test_start_program_that_outlives_its_process_is_replaced_after_a_cycle(world: JobTree) -> None:
    """The agent waits for a cycle, because the running start program could still start another process."""
    lingering = "echo start >>$log; sleep 600 & echo $! >$pidfile; exec sleep 700"
    async with world.supervising(world.job("web", lingering)) as supervisor:
        await kill_and_await_successor(supervisor, "web")

        assert world.lines() == ["start", "start"]
        assert world.told("Does not exist") == [("web", "restart")]


async def test_process_exit_is_logged_with_its_reason_and_fields(
    world: JobTree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="agent_shim.supervisor")
    words = "echo no space >&2; exit 3"
    job = world.job("web", f"echo $$ >$pidfile; until [ -e {world.base}/die ]; do sleep 0.02; done; {words}")
    async with world.supervising(job) as supervisor:
        await in_state(supervisor, "web", "running")
        (world.base / "die").touch()
        line = await until(lambda: next((r for r in caplog.records if ": died" in r.getMessage()), None))
        events = [event.text for event in supervisor.events("web")]

    assert events[:2] == ["start asked, now starting", "appeared, now running"]
    assert events[2] == "died: the process exited unexpectedly: exit 3 (no space), now down"
    assert line.levelname == "WARNING"
    assert line.getMessage() == "web: died: the process exited unexpectedly: exit 3 (no space), now down"
    assert line.members == {  # type: ignore[attr-defined]
        "process": "web",
        "job": "web",
        "trigger": "died",
        "state": "down",
        "exit": "exit 3",
    }


async def test_restarted_process_is_not_reported_as_running_before_it_has_settled(world: JobTree) -> None:
    """The Director relies on the first "running" that it sees, so quick restarts must not hide a crash loop."""
    async with world.supervising(world.job("web")) as supervisor:
        await in_state(supervisor, "web", "running")
        died_at = time.monotonic()
        kill(info(supervisor, "web").pid)
        await in_state(supervisor, "web", "down", "restarting", "settling")
        told = set()
        while (state := supervisor.job_state()) != "running":
            told.add(state)
            await asyncio.sleep(0.005)

        assert time.monotonic() - died_at >= world.timing.settle
        assert told <= {"failing", "starting"}
        assert info(supervisor, "web").reason == ""
        assert [e.event for e in world.events] == ["Does not exist", "Exists"]


async def test_service_with_a_zombie_process_is_treated_as_dead(world: JobTree) -> None:
    """If the agent waited until the zombie was reaped, a parent that does not reap its children could hide the exit."""
    start = f"{sys.executable} -c '"
    start += 'import os,sys,time\npid=os.fork()\nif pid==0: os.execv("/bin/sleep",["sleep","600"])\n'
    start += 'open(sys.argv[1],"w").write(f"{pid}\\n")\ntime.sleep(600)\' $pidfile'
    async with world.supervising(world.job("web", start, "exit 0")) as supervisor:
        found = await in_state(supervisor, "web", "running")
        kill(found.pid)
        await in_state(supervisor, "web", "down", "restarting", "settling")
        left = proc.stat(found.pid)

        assert left is None or left.state == "Z"
        assert world.events[0].event == "Does not exist"


@pytest.mark.parametrize(("cycle", "told"), [(0.001, [("PID changed", "alert")]), (600, [])])
async def test_successor_named_by_the_pidfile_is_adopted(
    world: JobTree, cycle: float, told: list[tuple[str, str]]
) -> None:
    world.timing = replace(world.timing, backoff_first=600, cycle=cycle)
    start = "echo once >>$log; sh -c 'sleep 600 & echo $! >'$pidfile'; trap \"sleep 600 & echo \\$! >'$pidfile'.next; "
    start += "mv '$pidfile'.next '$pidfile'; touch '$log'.new\" USR1; while :; do wait; sleep 0.01; done' &"
    start += " echo $! >$log.parent"
    async with world.supervising(world.job("web", start)) as supervisor:
        before = await in_state(supervisor, "web", "running")
        parent = await until(lambda: number_in(Path(f"{world.log}.parent")))
        found = proc.stat(parent)
        assert found is not None
        process.send(found.identity, signal.SIGUSR1)
        await until(Path(f"{world.log}.new").exists)
        kill(before.pid)
        await until(lambda: info(supervisor, "web").pid not in (0, before.pid))

        await until(lambda: [(e.event, e.action) for e in world.events] == told)
        assert info(supervisor, "web").state == "running"
        assert world.lines() == ["once"]


async def test_service_without_a_stop_program_is_not_restarted(world: JobTree) -> None:
    async with world.supervising(world.job("web", COUNTED, None)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        assert found.unheeded == ("restart when it ends (it has no stop program)",)
        kill(found.pid)
        found = await in_state(supervisor, "web", "down")
        await asyncio.sleep(world.timing.cycle * 3)

        assert supervisor.job_state() == "failing"
        assert found.reason == (
            "the process exited unexpectedly: SIGKILL; "
            "it is not restarted: it has no stop program, without which monit restarts nothing"
        )
        assert world.lines() == ["start web"]
        by_hand = world.script("web", "by-hand", "echo $$ >$pidfile; while :; do sleep 600; done")
        again = foreign(by_hand, TEST_OF=str(world.base), PATH="/bin")
        await until(lambda: info(supervisor, "web").pid == again)
        await in_state(supervisor, "web", "running")
        kill(again)


@pytest.mark.parametrize(
    ("statement", "why"),
    [("mode passive", "it is passive"), ("if does not exist then alert", "the rule for that says alert")],
)
async def test_passive_or_alert_only_service_is_started_on_request_but_not_restarted(
    world: JobTree, statement: str, why: str
) -> None:
    async with world.supervising(world.job("web", COUNTED, STOP, statement)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        kill(found.pid)
        assert (await in_state(supervisor, "web", "down")).reason.endswith(f"; it is not restarted: {why}")
        await asyncio.sleep(world.timing.cycle * 2)

        assert info(supervisor, "web").unheeded == ()
        assert world.lines() == ["start web"]
        assert [(e.event, e.action) for e in world.events] == [("Does not exist", "alert")]
        await supervisor.start()
        await in_state(supervisor, "web", "running")


async def test_rule_for_a_missing_process_may_run_a_program(world: JobTree) -> None:
    script = world.script("web", "tell", "echo told $MONIT_SERVICE >>$log")
    job = world.job("web", None, "exit 0", f'if does not exist then exec "{script}"')
    async with world.supervising(job) as supervisor:
        kill((await in_state(supervisor, "web", "running")).pid)

        await until(lambda: world.lines().count("told web") >= 2)
        assert world.events[0].action == "exec"


async def test_missing_process_rule_restarts_only_after_the_configured_number_of_cycles(world: JobTree) -> None:
    job = world.job("web", COUNTED, STOP, "if does not exist for 5 cycles then restart")
    async with world.supervising(job) as supervisor:
        kill((await in_state(supervisor, "web", "running")).pid)
        died_at = time.monotonic()
        await until(lambda: len(world.lines()) == 2)

        assert time.monotonic() - died_at >= 4 * world.timing.cycle


async def test_process_in_manual_mode_starts_only_on_request(world: JobTree) -> None:
    files = [
        world.job("web", None, None, "mode manual"),
        world.job("own", None, None, "mode manual", group="group own"),
    ]
    async with world.supervising(*files) as supervisor:
        await in_state(supervisor, "web", "running")
        assert info(supervisor, "own").state == "stopped"
        await supervisor.start_one("own")
        await in_state(supervisor, "own", "running")


# --- single services --------------------------------------------------------------------------------------------------


async def chain(world: JobTree) -> list[JobFile]:
    """Return four jobs. ``c`` depends on ``b``, which depends on ``a``. ``d`` is independent."""
    return [
        world.job("a", COUNTED, STOP),
        world.job("b", COUNTED, STOP, "depends on a"),
        world.job("c", COUNTED, STOP, "depends on b"),
        world.job("d", COUNTED, STOP),
    ]


async def all_in(supervisor: Supervisor, state: str, *names: str) -> None:
    for name in names:
        await in_state(supervisor, name, state)


async def test_single_service_stops_and_starts_with_its_dependents(world: JobTree) -> None:
    """Scripts stop a single service before a backup and start it afterwards. Stopped services that it depends on are
    started first.
    """
    async with world.supervising(*await chain(world)) as supervisor:
        await all_in(supervisor, "running", "a", "b", "c", "d")
        world.log.unlink()
        await supervisor.stop_one("B")
        await supervisor.finished("b")
        assert world.lines() == ["stop c", "stop b"]
        assert [told.state for told in supervisor.processes()] == ["running", "unknown", "unknown", "running"]
        await supervisor.start_one("b")
        await all_in(supervisor, "running", "b", "c")
        assert world.lines() == ["stop c", "stop b", "start b", "start c"]

        world.log.unlink()
        await supervisor.restart_one("b")
        await until(lambda: len(world.lines()) == 4)
        await all_in(supervisor, "running", "a", "b", "c", "d")
        assert world.lines() == ["stop c", "stop b", "start b", "start c"]
        assert world.events == []

        await supervisor.stop(wait=True)
        world.log.unlink()
        await supervisor.start_one("b")
        await in_state(supervisor, "b", "running")
        assert world.lines() == ["start a", "start b"]


async def test_crash_restarts_the_dependents(world: JobTree) -> None:
    """As in monit, indirect dependents are restarted too, because they may still be connected to the dead process."""
    files = [*await chain(world), world.job("e", COUNTED, STOP, "depends on a, c")]
    async with world.supervising(*files) as supervisor:
        await all_in(supervisor, "running", "a", "b", "c", "d", "e")
        untouched = info(supervisor, "d").pid
        world.log.unlink()
        kill(info(supervisor, "a").pid)
        await until(lambda: "start e" in world.lines())
        await all_in(supervisor, "running", "b", "c", "e")
        lines = [line for line in world.lines() if line != "start a"]

        assert lines == ["stop e", "stop c", "stop b", "start b", "start c", "start e"]
        assert info(supervisor, "d").pid == untouched


async def test_rule_that_stops_a_service_also_stops_its_dependents(world: JobTree) -> None:
    job = world.job("a", COUNTED, STOP, "if does not exist then stop")
    async with world.supervising(job, *(await chain(world))[1:]) as supervisor:
        await all_in(supervisor, "running", "a", "b", "c")
        kill(info(supervisor, "a").pid)
        await all_in(supervisor, "stopped", "a", "b", "c")

        assert info(supervisor, "d").state == "running"


async def test_unmonitor_includes_dependents_and_monitor_includes_prerequisites(world: JobTree) -> None:
    async with world.supervising(*await chain(world)) as supervisor:
        await all_in(supervisor, "running", "a", "b", "c", "d")
        await supervisor.unmonitor_one("b")
        assert [info(supervisor, name).state for name in "abcd"] == ["running", "unmonitored", "unmonitored", "running"]
        kill(info(supervisor, "c").pid)
        await until(lambda: not is_alive(info(supervisor, "c").pid))
        await supervisor.monitor_one("c")
        await all_in(supervisor, "running", "b", "c")

        assert world.lines().count("start c") == 2
        assert world.lines().count("start b") == 1


async def test_monitoring_a_dead_service_restarts_its_unmonitored_dependents(world: JobTree) -> None:
    async with world.supervising(*await chain(world)) as supervisor:
        await all_in(supervisor, "running", "a", "b", "c", "d")
        before = info(supervisor, "c").pid
        await supervisor.unmonitor_one("b")
        await supervisor.monitor_one("b")
        await in_state(supervisor, "b", "running")
        assert info(supervisor, "c").state == "unmonitored"  # b was still alive, so its dependent was not restarted

        await supervisor.unmonitor_one("b")
        kill(info(supervisor, "b").pid)
        world.log.unlink()
        await supervisor.monitor_one("b")
        await all_in(supervisor, "running", "b", "c")
        assert world.lines() == ["stop c", "start b", "start c"]
        assert info(supervisor, "c").pid != before


async def test_crash_restarts_unmonitored_dependents(world: JobTree) -> None:
    async with world.supervising(*await chain(world)) as supervisor:
        await all_in(supervisor, "running", "a", "b", "c", "d")
        await supervisor.unmonitor_one("c")
        before = info(supervisor, "c").pid
        await kill_and_await_successor(supervisor, "b")
        await in_state(supervisor, "c", "running")

        assert info(supervisor, "c").pid != before


# --- other checks -----------------------------------------------------------------------------------------------------


async def test_file_check_restarts_its_service_if_the_file_is_missing(world: JobTree) -> None:
    flag = world.base / "flag"
    text = f"""
    check file rules with path {flag}
      start program "{world.script("rules", "start", f"echo start >>$log; touch {flag}")}"
      stop program "{world.script("rules", "stop", f"echo stop >>$log; rm -f {flag}")}"
      group vcap
    """
    async with world.supervising(JobFile("rules", "", text)) as supervisor:
        await in_state(supervisor, "rules", "running")
        # The state is "starting" because this supervisor does not check rules, so not even the first check is made.
        assert [(told.name, told.state, told.mem_kb) for told in supervisor.processes()] == [("rules", "starting", 0)]
        flag.unlink()
        await until(lambda: world.lines() == ["start", "stop", "start"])
        await in_state(supervisor, "rules", "running")
        await supervisor.stop(wait=True)

        assert not flag.exists()
        assert supervisor.job_state() == "stopped"


async def test_host_check_is_reported_as_running_without_a_process(world: JobTree) -> None:
    text = "check host there with address localhost\n if failed port 1 then alert\n group vcap\n"
    async with world.supervising(JobFile("there", "", text)) as supervisor:
        await in_state(supervisor, "there", "running")
        await supervisor.stop(wait=True)


async def test_failed_start_is_reported_with_an_unreadable_pidfile_as_the_reason(world: JobTree) -> None:
    async with world.supervising(world.job("web", "mkdir $pidfile", timeout=1)) as supervisor:
        await in_state(supervisor, "web", "down")

        assert "its pidfile cannot be read: it is not a regular file" in info(supervisor, "web").reason
