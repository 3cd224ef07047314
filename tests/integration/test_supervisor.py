"""A supervisor starts, reports, stops and unmonitors real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from agent_shim.core.errors import ActionError
from agent_shim.host import clock, files, keeper, proc, process
from agent_shim.host.keeper import Keeper
from agent_shim.supervisor import supervisor as supervisors
from agent_shim.supervisor.ownership.process_finder import ProcessFinder
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.service import Service
from agent_shim.supervisor.supervisor import JobFile, read_saved
from tests.support.programs import foreign, is_alive, number_in
from tests.support.programs.jobs import FAST, LASTING, JobTree, in_state, info, program
from tests.support.waiting import until

# --- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start",
    [None, program("fork_twice.py", "$pidfile"), "sleep 600 & echo $! >$pidfile; wait"],
    ids=["becomes the daemon", "forks it twice", "stays beside it"],
)
async def test_start_program_may_daemonize_in_any_way(world: JobTree, start: str | None) -> None:
    async with world.supervising(world.job("web", start)) as supervisor:
        found = await in_state(supervisor, "web", "running")

        assert found.pid == number_in(world.pidfile("web"))
        assert supervisor.job_state() == "running"
        assert world.events == []


async def test_service_is_starting_until_its_process_exists(world: JobTree) -> None:
    """The Director polls right after the start and relies on the first "running" that it sees."""
    start = program("fork_twice.py", world.pidfile("web"), 0.2)
    async with world.supervising(world.job("web", start)) as supervisor:
        states = set()
        while (state := supervisor.job_state()) != "running":
            states.add(state)
            await asyncio.sleep(0.01)

        assert states == {"starting"}
        assert number_in(world.pidfile("web"))


async def test_start_program_environment_matches_monit(world: JobTree) -> None:
    start = "env >$log.new; umask >>$log.new; pwd >>$log.new; wc -c >>$log.new; ps -o sid= -p $$ >>$log.new"
    start += "; echo $$ >>$log.new; mv $log.new $log; echo $$ >$pidfile; exec sleep 600"
    async with world.supervising(world.job("web", start)):
        lines = await until(world.lines)
        variables = dict(line.split("=", 1) for line in lines[:-5])
        umask, directory, size, session, pid = lines[-5:]

        assert variables["PATH"] == "/bin:/usr/bin:/sbin:/usr/sbin"
        assert variables["MONIT_SERVICE"] == "web"
        date = variables["MONIT_DATE"]
        assert re.fullmatch(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d [+-]\d{4}", date)
        # Ignore PWD and similar variables, which the shell sets.
        others = {name for name in variables if not name.startswith("MONIT_")}
        assert others - {"PWD", "SHLVL", "_", "OLDPWD"} == {"PATH"}
        assert (umask, directory, size.strip(), session.strip()) == ("0022", "/", "0", pid)


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("echo no such table >&2; exit 3", "the start program exited: exit 3 (no such table)"),
        ("rm $0; exit 3", "cannot run {program}: No such file or directory"),
        ("sh -c 'exit 1' & echo $! >$pidfile; wait", "process {pid} of the pidfile exited immediately"),
    ],
)
async def test_failed_start_is_retried_and_reported_once_with_its_reason(world: JobTree, start: str, why: str) -> None:
    job = world.job("web", start, timeout=60)
    script = world.base / "jobs/web/bin/start"
    if "cannot run" in why:
        script.unlink()
    async with world.supervising(job) as supervisor:
        found = await in_state(supervisor, "web", "down")

        assert found.reason == "cannot start: " + why.format(program=script, pid=number_in(world.pidfile("web")))
        assert supervisor.job_state() == "failing"
        await until(lambda: info(supervisor, "web").restarts >= 2)
        assert [(e.service, e.event, e.action) for e in world.events] == [("web", "Execution failed", "alert")]


@pytest.mark.parametrize("end", ["success", "stop", "unmonitor"])
async def test_repeated_start_failure_is_reported_again_only_after_a_change(world: JobTree, end: str) -> None:
    start = f"[ -e {world.base}/good ] || exit 3; rm {world.base}/good; echo $$ >$pidfile; exec sleep 600"
    async with world.supervising(world.job("web", start)) as supervisor:
        await until(lambda: info(supervisor, "web").restarts >= 2)
        assert [e.event for e in world.events] == ["Execution failed"]
        if end == "success":
            (world.base / "good").touch()
            await in_state(supervisor, "web", "running")
            os.kill(info(supervisor, "web").pid, signal.SIGKILL)
        elif end == "stop":
            await supervisor.stop(wait=True)
            await supervisor.start()
        else:
            await supervisor.unmonitor()
            await supervisor.start()
        await until(lambda: [e.event for e in world.events].count("Execution failed") == 2)
        await supervisor.stop(wait=True)


async def test_failed_ulimit_in_a_start_program_is_reported_while_its_process_runs(world: JobTree) -> None:
    """If ``ulimit`` asks for more than the container's limit, the process runs with the lower limit."""
    drop = "setpriv --bounding-set=-sys_resource" if os.geteuid() == 0 else ""
    start = f"{drop} sh -c 'ulimit -n 64; ulimit -n 100000'; sleep 600 & echo $! >$pidfile"
    async with world.supervising(world.job("web", start)) as supervisor:
        await in_state(supervisor, "web", "running")
        await until(lambda: info(supervisor, "web").reason)

        reason = info(supervisor, "web").reason
        assert reason.startswith("running with a lower limit than its start program requested: ")
        assert "ulimit: " in reason


async def test_slow_start_program_continues_and_its_process_is_adopted(world: JobTree) -> None:
    world.timing = msgspec.structs.replace(FAST, cycle=0.5)
    start = "echo began >>$log; sleep 2; echo $$ >$pidfile; exec sleep 600"
    async with world.supervising(world.job("web", start, timeout=1)) as supervisor:
        found = await in_state(supervisor, "web", "down")
        assert re.fullmatch(
            r"cannot start: no process after 1 seconds, and its start program \(\d+\) still runs", found.reason
        )
        assert found.retry_secs is None
        states = [supervisor.job_state()]
        while supervisor.job_state() != "running":
            await asyncio.sleep(0.01)
            states.append(supervisor.job_state())

        assert list(dict.fromkeys(states)) == ["failing", "starting", "running"]
        assert info(supervisor, "web").pid == number_in(world.pidfile("web"))
        assert world.lines() == ["began"]
        assert [(e.event, e.action) for e in world.events] == [("Execution failed", "alert"), ("Exists", "alert")]


async def test_slow_start_program_that_fails_after_its_timeout_is_run_again(world: JobTree) -> None:
    world.timing = msgspec.structs.replace(FAST, cycle=0.5)
    start = "echo $$ >>$log; sleep 2; exit 3"
    async with world.supervising(world.job("web", start, timeout=1)) as supervisor:
        await in_state(supervisor, "web", "down")
        first, _ = await until(lambda: lines if len(lines := world.lines()) > 1 else None)
        assert not is_alive(int(first))


async def test_stop_kills_a_slow_start_program_with_its_children(world: JobTree) -> None:
    start = f"{program('ignore_term.sh', world.base / 'child')} & sleep 600"
    async with world.supervising(world.job("web", start, timeout=1)) as supervisor:
        await in_state(supervisor, "web", "down")
        child = await until(lambda: number_in(world.base / "child"))
        assert is_alive(child)
        await supervisor.stop(wait=True)

        assert not is_alive(child)


async def test_process_with_a_late_pidfile_is_adopted_without_a_second_start(world: JobTree) -> None:
    world.timing = type(world.timing)(settle=0.1, backoff_first=0.05, linger=0.1, look=0.02, cycle=600)
    start = f"echo once >>$log; {program('fork_twice.py', world.pidfile('web'), 1.5)}"
    async with world.supervising(world.job("web", start, timeout=1)) as supervisor:
        await in_state(supervisor, "web", "down")
        found = await in_state(supervisor, "web", "running")

        assert found.pid == number_in(world.pidfile("web"))
        assert world.lines() == ["once"]


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
async def test_stale_pidfile_is_ignored(world: JobTree) -> None:
    """The pidfile is older than the start, so the process whose pid it contains does not belong to the service."""
    stranger = process.spawn(["/bin/sleep", "600"], env={"TEST_OF": str(world.base)})
    world.pidfile("web").write_text(f"{stranger.pid}\n")
    job = world.job("web", "sleep 0.2; echo $$ >$pidfile; exec sleep 600", "exit 0", timeout=1)
    async with world.supervising(job) as supervisor:
        while (found := info(supervisor, "web")).state != "running":
            assert found.pid == 0
            await asyncio.sleep(0.01)
        assert found.pid not in (0, stranger.pid)
        world.pidfile("web").write_text(f"{stranger.pid}\n")
        await supervisor.stop(wait=True)

        assert not is_alive(found.pid)
        assert stranger.is_alive


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
async def test_pidfile_naming_a_process_that_the_script_did_not_start_is_ignored(world: JobTree) -> None:
    stranger = process.spawn(["/bin/sleep", "600"], env={"TEST_OF": str(world.base)})
    await until(lambda: clock.boot_ticks() > stranger.start_ticks)
    job = world.job("web", f"echo {stranger.pid} >$pidfile", "exit 0", timeout=1)
    async with world.supervising(job) as supervisor:
        await in_state(supervisor, "web", "down")
        assert supervisor.job_state() == "failing"
        await supervisor.stop(wait=True)

        assert stranger.is_alive


@pytest.mark.parametrize("stop", ["exit 0", "kill $(cat $pidfile)"])
async def test_process_started_by_hand_is_stopped_only_by_its_stop_program(world: JobTree, stop: str) -> None:
    job = world.job("web", "echo once >>$log", stop)
    away = world.base / "packages" / "web"
    away.parent.mkdir()
    shutil.copy("/bin/sleep", away)
    byhand = foreign(away, 600, TEST_OF=str(world.base))
    world.pidfile("web").write_text(f"{byhand}\n")
    async with world.supervising(job) as supervisor:
        found = await in_state(supervisor, "web", "running")
        assert (found.pid, world.lines()) == (byhand, [])
        refused = pytest.raises(ActionError, match=rf"errored: web: cannot end {byhand} \(web\)")
        with refused if stop == "exit 0" else contextlib.nullcontext():
            await supervisor.stop(wait=True)

        assert is_alive(byhand) == (stop == "exit 0")


async def test_process_started_by_monit_is_adopted(world: JobTree) -> None:
    """After an upgrade from the Go agent and monit, the process must not be started again."""
    command = "/bin/sh", "-c", "while :; do sleep 600; done", world.base / "web"
    monits = foreign(*command, TEST_OF=str(world.base), PATH="/bin")
    world.pidfile("web").write_text(f"{monits}\n")
    async with world.supervising(world.job("web", "exit 1", timeout=1)) as supervisor:
        assert (await in_state(supervisor, "web", "running")).pid == monits
        await supervisor.stop(wait=True)

        assert not is_alive(monits)


async def test_process_is_found_by_its_command_line_pattern(world: JobTree) -> None:
    name = f"marker_{os.getpid()}"
    script = world.script("web", "start", f"sh -c 'while :; do sleep 600; done' {name} &")
    stop = world.script("web", "stop", "exit 0")
    text = f"""
    check process web matching "{name}"
      start program "{script}"
      stop program "{stop}" with timeout 1 seconds
      group vcap
    """
    async with world.supervising(JobFile("web", "", text)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True)

        assert not is_alive(found.pid)


async def test_dependencies_start_first_and_stop_last(world: JobTree) -> None:
    start = "echo start $name >>$log; sleep 0.05; echo $$ >$pidfile; exec sleep 600"
    stop = "echo stop $name >>$log; kill $(cat $pidfile)"
    files = [
        world.job("c", start, stop, "depends on b"),
        world.job("b", start, stop, "depends on A"),
        world.job("a", start, stop),
    ]
    async with world.supervising(*files) as supervisor:
        await in_state(supervisor, "c", "running")
        await supervisor.stop(wait=True)

        assert world.lines() == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]


async def test_independent_processes_start_in_parallel(world: JobTree) -> None:
    """Each start program waits until the other one has begun."""
    start = "touch $log.$name; while [ ! -e $log.{} ]; do sleep 0.01; done; echo $$ >$pidfile; exec sleep 600"
    async with world.supervising(world.job("a", start.format("b")), world.job("b", start.format("a"))) as supervisor:
        await in_state(supervisor, "a", "running")
        await in_state(supervisor, "b", "running")


async def test_dependent_of_a_failed_service_is_still_started(world: JobTree) -> None:
    """As in monit, dependencies determine only the start order."""
    files = [world.job("b", None, "exit 0", "depends on a"), world.job("a", "exit 1")]
    async with world.supervising(*files) as supervisor:
        await in_state(supervisor, "b", "running")


# --- reports ----------------------------------------------------------------------------------------------------------


async def test_invalid_monit_file_is_reported_as_one_failing_process(world: JobTree) -> None:
    files = [world.job("web"), JobFile("bad", "", "check process bad with pidfile"), world.job("worker")]
    async with world.supervising(*files) as supervisor:
        await in_state(supervisor, "web", "running")
        await in_state(supervisor, "worker", "running")

        assert [(p.name, p.state) for p in supervisor.processes()] == [
            ("web", "running"),
            ("bad", "failing"),
            ("worker", "running"),
        ]
        assert supervisor.job_state() == "failing"
        assert info(supervisor, "bad").reason.startswith("cannot read bad/monit: line 1")
        await supervisor.stop(wait=True)
        assert supervisor.job_state() == "stopped"


async def test_processes_outside_the_vcap_group_are_hidden_from_the_director(world: JobTree) -> None:
    files = [world.job("web"), world.job("own", group="group other"), world.job("ill", "exit 1", group="")]
    async with world.supervising(*files) as supervisor:
        own = await in_state(supervisor, "own", "running")
        await in_state(supervisor, "web", "running")
        await in_state(supervisor, "ill", "down")

        assert supervisor.job_state() == "running"
        assert [told.name for told in supervisor.processes()] == ["web"]
        assert supervisor.count() == 1
        await supervisor.stop(wait=True)
        assert is_alive(own.pid)


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_stop_runs_the_stop_program(world: JobTree) -> None:
    stop = "kill $(cat $pidfile); sleep 0.1; echo done >>$log"
    async with world.supervising(world.job("web", None, stop)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True)

        assert world.lines() == ["done"]
        assert not is_alive(found.pid)
        assert supervisor.job_state() == "stopped"
        assert [(p.name, p.state, p.uptime_secs) for p in supervisor.processes()] == [("web", "unknown", 0)]
        assert world.paths.stopped_marker.read_bytes() == b""
        assert world.events == []
        await supervisor.start()
        assert not world.paths.stopped_marker.exists()
        await in_state(supervisor, "web", "running")


async def test_instance_is_starting_as_soon_as_a_start_is_requested(world: JobTree) -> None:
    job = world.job("web")
    async with world.supervising(job) as supervisor:
        await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True)
        await supervisor.forget()
        seen = set()
        await supervisor.configure([job])
        starting = asyncio.create_task(supervisor.start())
        while not starting.done():
            seen.add(supervisor.job_state())
            await asyncio.sleep(0)

        assert seen <= {"stopped", "starting"}
        assert supervisor.job_state() == "starting"
        assert [path.name for path in world.paths.monit_job.iterdir()] == ["0000_web.monitrc"]
        await in_state(supervisor, "web", "running")


async def test_stop_is_answered_after_the_pending_save(world: JobTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the agent crashes right after its answer, the saved state must already say that all jobs are stopped."""
    write, leave = files.write_atomic, Service.wait_to_leave

    def slowly(path: Path, content: bytes, **options: Any) -> None:
        if b'"stopped"' in content:
            time.sleep(0.3)
        write(path, content, **options)

    async def late(service: Service, states: Any) -> None:
        await leave(service, states)
        await asyncio.sleep(0.1)

    async with world.supervising(world.job("web"), world.job("db")) as supervisor:
        for name in ("web", "db"):
            await in_state(supervisor, name, "running")
        monkeypatch.setattr(files, "write_atomic", slowly)
        monkeypatch.setattr(Service, "wait_to_leave", late)
        await supervisor.stop(wait=True)

        saved = read_saved(world.paths.supervisor_state)
        assert saved is not None
        assert [record.state.value for record in saved.services.values()] == ["stopped"] * 2


async def test_job_starts_even_if_its_monit_file_cannot_be_written(
    world: JobTree, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is only for operators, so a warning is enough."""
    world.paths.monit_job.parent.mkdir(parents=True, exist_ok=True)
    world.paths.monit_job.write_text("")
    async with world.supervising(world.job("web")) as supervisor:
        await in_state(supervisor, "web", "running")

    assert "cannot write monit files for operators" in caplog.text


def _ticks(pid: int) -> int:
    found = proc.stat(pid)
    assert found is not None
    return found.start_ticks


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (f"exec {program('ignore_term.sh', '$pidfile')}", "echo $$ >$log"),
        (None, "echo $$ >$log; kill $(cat $pidfile); exec sleep 600"),
    ],
    ids=["the process goes on", "the program hangs"],
)
async def test_stop_kills_processes_that_remain_after_the_stop_timeout(
    world: JobTree, start: str | None, stop: str
) -> None:
    async with world.supervising(world.job("web", start, stop, timeout=1)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True)

        assert not is_alive(found.pid)
        assert not is_alive(int(world.lines()[0]))
        assert [(e.event, e.description) for e in world.events] == [("Execution failed", "failed to stop")]


@pytest.mark.parametrize(("stop", "said"), [(None, []), ("echo stopped >>$log", ["stopped"])])
async def test_stop_works_without_a_stop_program_or_a_running_process(
    world: JobTree, stop: str | None, said: list[str]
) -> None:
    async with world.supervising(world.job("web", None, stop)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        if stop is not None:
            await supervisor.unmonitor()
            process.send((found.pid, _ticks(found.pid)), signal.SIGKILL)
            await until(lambda: not is_alive(found.pid))
        await supervisor.stop(wait=True)

        assert not is_alive(found.pid)
        assert world.lines() == said


async def test_process_watched_by_a_check_without_a_start_program_is_not_signalled(world: JobTree) -> None:
    """A check without a start program watches a system process."""
    stranger = process.spawn(["/bin/sleep", "600"], env={"TEST_OF": str(world.base)})
    world.pidfile("sys").write_text(f"{stranger.pid}\n")
    stop = world.script("sys", "stop", "echo $$ >>$log; exec sleep 600")
    text = f"""
    check process sys with pidfile {world.pidfile("sys")}
      stop program "{stop}" with timeout 1 seconds
      group vcap
    """
    async with world.supervising(JobFile("sys", "", text)) as supervisor:
        assert (await in_state(supervisor, "sys", "running")).pid == stranger.pid
        await supervisor.stop(wait=True)

        assert stranger.is_alive
        assert not is_alive(int(world.lines()[0]))


@pytest.mark.attack("a job hides a process so that stopping the job misses it")
@pytest.mark.parametrize("how", ["", "wipe"])
async def test_no_job_process_survives_a_stop(world: JobTree, how: str) -> None:
    """A process may have left its session and cleared its environment."""
    child = world.base / "child"
    start = f"exec {program('new_session.py', '$pidfile', child, how)}"
    async with world.supervising(world.job("web", start)) as supervisor:
        await in_state(supervisor, "web", "running")
        pid = await until(lambda: number_in(child))
        await supervisor.stop(wait=True)

        assert not is_alive(pid)


async def test_children_of_a_killed_process_are_killed_before_its_successor_starts(world: JobTree) -> None:
    """A child in another session and without an environment could still hold a port that the successor needs."""
    child = world.base / "child"
    start = f"[ -e {child} ] && kill -0 $(cat {child}) && echo beside >>$log; rm -f {child}; exec " + program(
        "new_session.py", "$pidfile", child, "wipe"
    )
    async with world.supervising(world.job("web", start)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        pid = await until(lambda: number_in(child))
        process.send((found.pid, _ticks(found.pid)), signal.SIGKILL)
        await until(lambda: number_in(child) not in (None, pid))

        assert not is_alive(pid)
        assert world.lines() == []
        await supervisor.stop(wait=True)


async def test_child_forked_right_before_an_exit_is_killed_before_the_successor_starts(world: JobTree) -> None:
    """The child has no environment and starts in the same clock tick in which its parent is reaped, so it is hard to
    recognize.
    """
    child = world.base / "child"
    forks = f"env -i sleep 600 & echo $! >{child}; kill -9 $$"
    start = f"trap '{forks}' USR1; echo $$ >$pidfile; [ -e {child} ] && {LASTING}; while :; do sleep 0.01; done"
    async with world.supervising(world.job("web", start)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        process.send((found.pid, _ticks(found.pid)), signal.SIGUSR1)
        pid = await until(lambda: number_in(child))
        await until(lambda: info(supervisor, "web").pid not in (0, found.pid))

        assert not is_alive(pid)
        await supervisor.stop(wait=True)


async def test_stop_during_a_start_kills_the_start_program(world: JobTree) -> None:
    stop = "kill -0 $(cat $log) && echo beside >>$log"
    async with world.supervising(world.job("web", "echo $$ >>$log; sleep 600; echo $$ >$pidfile", stop)) as supervisor:
        pid = int((await until(world.lines))[0])
        await supervisor.stop(wait=True)

        assert not is_alive(pid)
        assert len(world.lines()) == 1
        assert info(supervisor, "web").state == "stopped"


async def test_stop_is_complete_before_the_director_gives_up(world: JobTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The monit file may allow the stop more time than the Director waits, so SIGKILL is sent earlier than the file
    says.
    """
    assert 0 < supervisors.KILL_SHARE < 1
    monkeypatch.setattr(supervisors, "KILL_SHARE", 0.02)  # SIGKILL is sent after 1 s.
    start = f"exec {program('ignore_term.sh', '$pidfile')}"
    async with world.supervising(world.job("web", start, "sleep 600", timeout=600)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True, timeout=50)

        assert not is_alive(found.pid)


async def test_a12_stop_timeout_error_has_the_message_that_the_director_tolerates(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "send", _lose)
    monkeypatch.setattr(Keeper, "kill", AsyncMock())
    job = world.job("web", f"exec {program('ignore_term.sh', '$pidfile')}", "exit 0")
    async with world.supervising(job, world.job("fine")) as supervisor:
        await in_state(supervisor, "web", "running")
        await in_state(supervisor, "fine", "running")
        await supervisor.stop_one("fine")
        await in_state(supervisor, "fine", "stopped")
        with pytest.raises(ActionError) as caught:
            await supervisor.stop(wait=True, timeout=1.8)

        assert str(caught.value) == "Timed out waiting for services 'web' to stop after 0.03 minutes"
        monkeypatch.undo()


def _lose(_: tuple[int, int], sig: int) -> bool:
    """Report success without sending the signal. The process then seems to hang in the kernel."""
    return True


async def test_a12_stopping_an_unkillable_process_fails(world: JobTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "send", _lose)
    monkeypatch.setattr(Keeper, "kill", AsyncMock())
    monkeypatch.setattr(keeper, "KILL_TIMEOUT_S", 0.1)
    job = world.job("web", f"exec {program('ignore_term.sh', '$pidfile')}", "exit 0", timeout=1)
    async with world.supervising(job) as supervisor:
        found = await in_state(supervisor, "web", "running")
        with pytest.raises(ActionError) as caught:
            await supervisor.stop(wait=True)

        reason = info(supervisor, "web").reason
        # The shell's child may still be named sh, because it might not have become sleep yet when its name is read.
        assert re.fullmatch(rf"cannot end {found.pid} \((sh|sleep)\)", reason)
        assert str(caught.value) == f"Stopping services '[web]' errored: web: {reason}"
        monkeypatch.undo()


async def test_stop_fails_while_the_keeper_reports_children_that_proc_does_not_show(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a killed process that is being traced stays a zombie until its tracer reaps it."""
    monkeypatch.setattr(process, "send", _lose)
    monkeypatch.setattr(Keeper, "kill", AsyncMock())
    monkeypatch.setattr(Keeper, "processes", lambda _: [])
    monkeypatch.setattr(keeper, "KILL_TIMEOUT_S", 0.1)
    job = world.job("web", f"exec {program('ignore_term.sh', '$pidfile')}", "exit 0", timeout=1)
    async with world.supervising(job) as supervisor:
        await in_state(supervisor, "web", "running")
        with pytest.raises(ActionError, match="keeper of web"):
            await supervisor.stop(wait=True)

        assert info(supervisor, "web").state != "stopped"
        monkeypatch.undo()


async def test_start_requested_during_a_stop_runs_after_the_stop(world: JobTree) -> None:
    """The start program must not run at the same time as the stop program."""
    job = world.job(
        "web",
        "echo start >>$log; echo $$ >$pidfile; exec sleep 600",
        "kill $(cat $pidfile); sleep 0.1; echo stop >>$log",
    )
    async with world.supervising(job) as supervisor:
        first = await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=False)
        await supervisor.start()
        await in_state(supervisor, "web", "running")

        assert world.lines() == ["start", "stop", "start"]
        assert info(supervisor, "web").pid != first.pid


# --- unmonitoring -----------------------------------------------------------------------------------------------------


async def test_unmonitored_process_keeps_running(world: JobTree) -> None:
    """The Director unmonitors all services before a drain. Until it stops or starts them, nothing is restarted, and the
    instance is failing.
    """
    async with world.supervising(world.job("web")) as supervisor:
        found = await in_state(supervisor, "web", "running")
        await supervisor.unmonitor()

        assert is_alive(found.pid)
        assert [(told.name, told.state) for told in supervisor.processes()] == [("web", "unknown")]
        assert supervisor.job_state() == "failing"
        await supervisor.start()
        assert (await in_state(supervisor, "web", "running")).pid == found.pid


async def test_apply_between_starts_does_not_affect_processes(world: JobTree) -> None:
    """The Director's apply replaces running jobs' configuration and monit files. The new configuration takes effect
    only at the jobs' next stop.
    """
    job, more = world.job("web"), world.job("more", file="x")
    async with world.supervising(job) as supervisor:
        found = await in_state(supervisor, "web", "running")
        await supervisor.forget()
        assert supervisor.processes() == []
        assert not world.paths.monit_job.exists()
        await supervisor.configure([job, more])

        assert info(supervisor, "web").pid == found.pid
        assert info(supervisor, "web").state == "running"
        await supervisor.start()
        assert sorted(path.name for path in world.paths.monit_job.iterdir()) == [
            "0000_more_x.monitrc",
            "0001_web.monitrc",
        ]
        assert (world.paths.monit_job / "0001_web.monitrc").read_text() == job.text
        await supervisor.configure([world.job("web", None, "echo new >>$log; kill $(cat $pidfile)")])
        assert info(supervisor, "web").pid == found.pid
        await supervisor.stop(wait=True)

        assert world.lines() == ["new"]


async def test_exception_in_a_service_task_stops_the_supervisor(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the exception were ignored, the service would stay unsupervised without anybody noticing. The agent restarts
    instead.
    """

    async def fail(self: ProcessFinder, spec: ProcessSpec) -> str:
        raise RuntimeError(f"a bug about {spec.name}")

    monkeypatch.setattr(ProcessFinder, "gone", fail)
    async with world.supervising(world.job("web")) as supervisor:
        found = await in_state(supervisor, "web", "running")
        process.send((found.pid, _ticks(found.pid)), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="a bug about web"):
            async with asyncio.timeout(10):
                await supervisor.run()


async def test_stop_spares_a_process_that_a_service_in_another_group_watches(world: JobTree) -> None:
    """The Director's stop does not include the service in the other group."""
    jobs = [world.job("web"), world.job("other", "exit 1", group="group other")]
    script = world.script("other", "pre-start", "setsid sleep 600 & echo $! >$pidfile")
    async with world.supervising() as supervisor:
        await supervisor.configure(jobs)
        await (await supervisor.spawn_script("other", [str(script)], env={})).wait()
        await supervisor.start()
        pid = (await in_state(supervisor, "other", "running")).pid

        await supervisor.stop(wait=True)

        assert is_alive(pid)
        await supervisor.stop_one("other")
        await in_state(supervisor, "other", "stopped")
        assert not is_alive(pid)
