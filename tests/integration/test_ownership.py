"""Tests jobs that try to make the agent kill other jobs' processes or spare their own."""

from __future__ import annotations

import asyncio
import os
import resource
import select
from pathlib import Path

import pytest

from agent_shim.host import proc, process
from tests.support import descriptors
from tests.support.programs import argv, foreign, is_alive, kill, number_in, number_of_program
from tests.support.programs.jobs import LASTING, JobTree, in_state, info, program
from tests.support.waiting import until


@pytest.fixture
def world(world: JobTree) -> JobTree:
    world.open()
    return world


WAITS = "echo begun >>$log; until [ -s {victim} ]; do sleep 0.02; done; cp {victim} $pidfile; " + LASTING


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
async def test_new_pidfile_naming_a_process_started_elsewhere_is_ignored(world: JobTree) -> None:
    victim, go = world.base / "victim", world.base / "go"
    outside = f"until [ -e {go} ]; do sleep 0.02; done; sleep 600 & echo $! >{victim}; wait"
    parent = foreign("/bin/sh", "-c", outside, TEST_OF=str(world.base), PATH="/bin:/usr/bin")
    job = world.job("web", WAITS.format(victim=victim), "exit 0", timeout=1)
    async with world.supervising(job) as supervisor:
        await until(world.lines)
        go.touch()
        pid = await until(lambda: number_of_program(victim, "sleep"))
        found = await in_state(supervisor, "web", "down")
        assert f"the pidfile names process {pid} (sleep): it was not started by this agent" in found.reason
        await supervisor.stop(wait=True)

        assert is_alive(pid)
        assert is_alive(parent)


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
async def test_pidfile_naming_a_process_of_the_agent_is_ignored(world: JobTree) -> None:
    """If the agent trusted the pidfile, a job could make the agent kill its own sshd, scripts or workers."""
    victim = world.base / "victim"
    async with world.supervising(world.job("web", WAITS.format(victim=victim), "exit 0", timeout=1)) as supervisor:
        await until(world.lines)
        own = process.spawn(["/bin/sleep", "600"], env={"TEST_OF": str(world.base)})
        victim.write_text(f"{own.pid}\n")
        found = await in_state(supervisor, "web", "down")
        assert f"the pidfile names process {own.pid} (sleep): it belongs to the agent" in found.reason
        await supervisor.stop(wait=True)

        assert own.is_alive


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
async def test_pidfile_naming_a_keeper_is_ignored(world: JobTree) -> None:
    """Even the service's own keeper is not accepted as its process, because a new keeper could happen to have the pid
    in an old pidfile.
    """
    job = world.job("web", "echo $PPID >$pidfile; " + LASTING, "exit 0", timeout=1)
    async with world.supervising(job) as supervisor:
        found = await in_state(supervisor, "web", "down")
        kept = number_in(world.pidfile("web"))
        assert f"the pidfile names process {kept} (keeper): it belongs to the agent" in found.reason
        await supervisor.stop(wait=True)


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
async def test_pidfile_naming_a_process_of_another_job_is_ignored(world: JobTree) -> None:
    """The other job's process has no environment, so only its keeper shows which job it belongs to."""
    victim = world.base / "victim"
    start = "echo $$ >$pidfile; exec env -i PATH=/bin:/usr/bin sleep 600"
    liar = world.job("liar", WAITS.format(victim=victim), "exit 0", timeout=3)
    async with world.supervising(world.job("web", start), liar) as supervisor:
        await until(world.lines)
        pid = (await in_state(supervisor, "web", "running")).pid
        await supervisor.restart_one("web")
        await until(lambda: info(supervisor, "web").pid not in (0, pid))
        pid = (await in_state(supervisor, "web", "running")).pid
        victim.write_text(f"{pid}\n")
        # Wait for this reason and not just for the state "down". On a slow machine, the start of ``liar`` may time out
        # before ``liar`` reads the victim's pid, so only a later start writes that pid into the pidfile.
        refused = f"the pidfile names process {pid} (sleep): it belongs to web"
        await until(lambda: refused in info(supervisor, "liar").reason)
        await supervisor.stop_one("liar")
        await in_state(supervisor, "liar", "stopped")

        assert is_alive(pid)
        await supervisor.stop(wait=True)


@pytest.mark.attack("a job hides a process so that stopping the job misses it")
@pytest.mark.parametrize("name", ["", "\\rUid:\\t0"])
async def test_stop_kills_a_hidden_daemon_but_not_processes_of_another_job(world: JobTree, name: str) -> None:
    """The daemon was double-forked, has left its session and cleared its environment, and has no pidfile. Its name may
    contain a line break that forges a user in /proc/PID/status.
    """
    child = world.base / "child"
    start = f"exec {program('escape.py', '$pidfile', child)} '' '{name}'"
    async with world.supervising(world.job("web", start), world.job("other")) as supervisor:
        await in_state(supervisor, "web", "running")
        other = await in_state(supervisor, "other", "running")
        pid = await until(lambda: number_in(child))
        await until(lambda: proc.name(pid) not in ("", "python3", "escape.py"))
        await supervisor.stop_one("web")
        found = await in_state(supervisor, "web", "stopped", "unmonitored")

        assert (found.state, is_alive(pid)) == ("stopped", False)
        assert is_alive(other.pid)
        await supervisor.stop(wait=True)


@pytest.mark.attack("a job forks faster than its processes can be killed")
@pytest.mark.parametrize("how", ["", "setsid", "setsid wipe"])
@pytest.mark.parametrize("whose", ["of this agent", "of an earlier agent"])
async def test_stop_kills_a_process_that_forks_endlessly(world: JobTree, how: str, whose: str) -> None:
    counter = world.base / "counter"
    storm = f"setsid perl {Path(argv('storm.pl')[1])} {counter} {how}"
    jobs = [world.job("web", f"{storm} & echo $$ >$pidfile; {LASTING}")]
    try:
        async with world.supervising(*jobs) as supervisor:
            await in_state(supervisor, "web", "running")
            await until(lambda: count(counter) > 20)
            if whose == "of this agent":
                await supervisor.stop(wait=True)
        if whose == "of an earlier agent":
            async with world.supervisor() as supervisor:
                assert await supervisor.recover()
                await in_state(supervisor, "web", "running")
                await supervisor.stop(wait=True)

        at = count(counter)
        await asyncio.sleep(0.3)  # a process that is still running would fork hundreds of times during this sleep
        assert count(counter) == at
    finally:
        counter.unlink(missing_ok=True)


@pytest.mark.attack("a job forks faster than its processes can be killed")
async def test_zombies_of_one_job_do_not_prevent_another_job_from_stopping(world: JobTree) -> None:
    jobs = [world.job("web"), world.job("noise", f"{program('keep_zombies.py')} & echo $! >$pidfile")]
    async with world.supervising(*jobs) as supervisor:
        await in_state(supervisor, "web", "running")
        await in_state(supervisor, "noise", "running")
    async with world.supervisor() as supervisor:
        await supervisor.recover()
        web = await in_state(supervisor, "web", "running")
        noise = await in_state(supervisor, "noise", "running")
        await supervisor.stop_one("web")
        await in_state(supervisor, "web", "stopped")

        assert not is_alive(web.pid)
        assert info(supervisor, "noise").pid == noise.pid
        await supervisor.stop(wait=True)
        assert not is_alive(noise.pid)


def count(path: Path) -> int:
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else 0


@pytest.mark.attack("a job hides a process so that stopping the job misses it")
async def test_stop_kills_a_process_whose_main_thread_has_exited(world: JobTree) -> None:
    """The kernel shows such a process as a zombie even though its other threads are running."""
    async with world.supervising(world.job("web", f"exec {program('leaderless.py', '$pidfile')}")) as supervisor:
        pid = (await in_state(supervisor, "web", "running")).pid
        pidfd = os.pidfd_open(pid)
        try:
            await supervisor.stop(wait=True)

            assert select.select([pidfd], [], [], 0)[0], f"it runs on: {proc.stat(pid)}"
        finally:
            os.close(pidfd)


@pytest.mark.attack("a job hides a process so that stopping the job misses it")
async def test_stop_kills_processes_below_a_subreaper_in_the_job(world: JobTree) -> None:
    """The job's orphans are reparented to its subreaper first, and to the agent's keeper only when the subreaper
    exits.
    """
    child = world.base / "child"
    become = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"
    script = world.base / "subreaper.py"
    arguments = argv("escape.py", world.pidfile("web"), child)
    script.write_text(f"{become}\nimport os\nos.execv({arguments[0]!r}, {arguments!r})\n")
    async with world.supervising(world.job("web", f"exec {argv('escape.py')[0]} {script}")) as supervisor:
        await in_state(supervisor, "web", "running")
        pid = await until(lambda: number_in(child))
        await supervisor.stop(wait=True)

        assert not is_alive(pid)


async def test_processes_left_by_a_killed_daemon_are_killed_before_its_next_start(world: JobTree) -> None:
    child = world.base / "child"
    job = world.job("web", f"echo start >>$log; setsid sleep 600 & echo $! >{child}; echo $$ >$pidfile; {LASTING}")
    async with world.supervising(job) as supervisor:
        kill((await in_state(supervisor, "web", "running")).pid)
        worker = await until(lambda: number_in(child))
        await until(lambda: world.lines() == ["start", "start"])

        assert not is_alive(worker)
        await supervisor.stop(wait=True)


async def test_stop_needs_no_descriptor_per_process(world: JobTree) -> None:
    """A job may have more processes than the agent can have open descriptors."""
    start = f"for n in $(seq 60); do sleep 600 & done; echo $$ >$pidfile; {LASTING}"
    async with world.supervising(world.job("web", start, "exit 0")) as supervisor:
        pid = (await in_state(supervisor, "web", "running")).pid
        children = [each.pid for each in proc.table().values() if each.parent == pid]
        assert len(children) == 60
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 30, hard))
        try:
            await supervisor.stop(wait=True)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        assert not any(map(is_alive, [pid, *children]))


async def test_service_counts_as_running_while_the_agent_has_no_free_descriptor(
    world: JobTree, caplog: pytest.LogCaptureFixture
) -> None:
    start = f"echo start >>$log; echo $$ >$pidfile; {LASTING}"
    job = world.job("web", start, "kill $(cat $pidfile)", "if totalmem > 10 GB then restart")
    async with world.supervising(job) as supervisor:
        watching = asyncio.create_task(supervisor.run())
        pid = (await in_state(supervisor, "web", "running")).pid
        with descriptors.none_free() as use_up:
            await until(lambda: use_up() and "rules has failed" in caplog.text)
            found = info(supervisor, "web")
            assert (found.state, found.pid) == ("running", pid)
            stopping = asyncio.create_task(supervisor.stop_one("web"))
            await until(lambda: use_up() and "cannot watch the processes of web" in caplog.text)
            assert info(supervisor, "web").state == "stopping"
        await stopping
        await in_state(supervisor, "web", "stopped")

        assert not is_alive(pid)
        assert world.lines() == ["start"]
        watching.cancel()
