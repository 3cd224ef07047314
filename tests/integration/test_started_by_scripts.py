"""Tests services whose processes were started by one of the job's scripts, as in bosh-dns-release.

There, the pre-start runs three services' ctl scripts as root and as vcap. When the services are started later,
the ctl scripts find the processes running and exit.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from agent_shim.core.errors import ActionError
from agent_shim.host import clock, proc
from agent_shim.services.scripts import Scripts
from agent_shim.supervisor.supervisor import JobFile, Supervisor
from tests.support.ports import free_port
from tests.support.programs import is_alive, number_in, number_of_program
from tests.support.programs.jobs import JobTree, in_state, info
from tests.support.waiting import until

NAMES = ("dns", "health", "resolvconf")
CTL = """
give() {{ {give}; }}
case $1 in
start)
  if [ -e $pidfile ] && kill -0 $(cat $pidfile); then exit 0; fi
  echo start $name >>$log
  {as_user} sh -c 'sleep 600 & echo $!; exec sleep 601' >{child} &
  echo $! >$pidfile
  give ;;
stop)
  kill $(cat $pidfile)
  rm -f $pidfile ;;
esac
"""


@pytest.fixture
def world(world: JobTree) -> JobTree:
    world.open()
    return world


@contextlib.asynccontextmanager
async def adopted(world: JobTree) -> AsyncIterator[tuple[Supervisor, list[int]]]:
    """Run a pre-start that starts three services' processes, then start the services.

    Yield the supervisor and the pids of the processes and their children.
    """
    job = dns(world)
    async with world.supervising() as supervisor:
        await run_script(world, supervisor, "pre-start")
        found = await until_started(world)
        await supervisor.configure([job])
        await supervisor.start()
        for name in NAMES:
            await in_state(supervisor, name, "running")
        yield supervisor, found


def dns(world: JobTree, pre_start: str = "") -> JobFile:
    """Return a job with three services, and write its pre-start script.

    The script contains ``pre_start`` or, without it, runs the services' ctl scripts.
    """
    is_root = os.geteuid() == 0
    lines, ctls = [], []
    for name in NAMES:
        as_user = "setpriv --reuid=1000 --regid=1000 --clear-groups --" if is_root and name == "dns" else ""
        # As in the release, every start chowns the pidfiles to vcap, including those that root wrote.
        give = f"chown -R 1000 {world.pidfile(name)}" if is_root else ":"
        child = world.base / f"{name}.child"
        ctl = world.script(name, "ctl", CTL.format(as_user=as_user, give=give, child=child))
        lines += [f"check process {name} with pidfile {world.pidfile(name)}", "group vcap"]
        lines += [f'start program "{ctl} start"', f'stop program "{ctl} stop"']
        ctls.append(f"{ctl} start")
    world.script("bosh-dns", "pre-start", pre_start or "\n".join(ctls))
    return JobFile("bosh-dns", "", "\n".join([*lines, ""]))


async def run_script(world: JobTree, supervisor: Supervisor, name: str, job: str = "bosh-dns") -> None:
    scripts = Scripts(world.paths, {"TEST_OF": str(world.base)}, supervisor.spawn_script)
    world.paths.log.mkdir(parents=True, exist_ok=True)
    await scripts.run_all(name, [job], {})


def pids(world: JobTree) -> list[int]:
    """Return the pids of the three services' processes and their children, without those that do not exist yet."""
    files = [path for name in NAMES for path in (world.pidfile(name), world.base / f"{name}.child")]
    return [pid for path in files if (pid := number_in(path))]


async def until_started(world: JobTree) -> list[int]:
    """Wait until all three services have a process and a child. Return their pids."""
    return await until(lambda: found if len(found := pids(world)) == 6 else None)


async def test_processes_started_by_pre_start_belong_to_the_services(world: JobTree) -> None:
    async with adopted(world) as (supervisor, found):
        for name in NAMES:
            shown = info(supervisor, name)
            stat = proc.stat(shown.pid)
            assert stat is not None
            assert shown.pid == number_in(world.pidfile(name))
            assert shown.process.uptime_secs >= clock.uptime_of(stat.start_ticks) - 1
        assert sorted(world.lines()) == [f"start {name}" for name in sorted(NAMES)]

        await supervisor.stop_one("dns")
        await in_state(supervisor, "dns", "stopped")
        assert [is_alive(pid) for pid in found] == [False, False, True, True, True, True]
        await supervisor.start_one("dns")
        await in_state(supervisor, "dns", "running")
        later = pids(world)
        await supervisor.stop(wait=True)

        assert not any(map(is_alive, [*found, *later]))


async def test_killed_process_started_by_pre_start_is_restarted(world: JobTree) -> None:
    """The other services' processes must keep running, even though they all have the same keeper."""
    async with adopted(world) as (supervisor, found):
        os.kill(found[0], 9)
        await until(lambda: info(supervisor, "dns").pid not in (0, found[0]))

        assert [is_alive(pid) for pid in found[2:]] == [True] * 4
        await supervisor.stop(wait=True)
        assert not any(map(is_alive, pids(world)))


async def test_next_agent_recognizes_processes_started_by_pre_start(world: JobTree) -> None:
    job = dns(world)
    async with world.supervising() as supervisor:
        await run_script(world, supervisor, "pre-start")
        found = await until_started(world)
    async with world.supervising(job) as supervisor:
        for name in NAMES:
            await in_state(supervisor, name, "running")
        await supervisor.stop(wait=True)

        assert not any(is_alive(number) for number in found[::2])
        assert len(world.lines()) == 3


async def test_stop_kills_processes_left_by_a_failed_pre_start(world: JobTree) -> None:
    """The Director stops all jobs before it runs pre-start again. If a process remained, pre-start could find a port or
    lock in use.
    """
    other = world.base / "other.number"
    job = dns(world, f"setsid sleep 600 & echo $! >{other}; exit 1")
    async with world.supervising() as supervisor:
        with pytest.raises(ActionError):
            await run_script(world, supervisor, "pre-start")
        pid = await until(lambda: number_in(other))
        await supervisor.configure([job])
        await supervisor.stop(wait=True)

        assert not is_alive(pid)


SERVER = "import socket, sys, time; held = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"
SERVER_CTL = """
case $1 in
start)
  if [ -e $pidfile ] && kill -0 $(cat $pidfile); then exit 0; fi
  echo start >>$log
  {server} {port} 2>/dev/null &
  echo $! >$pidfile ;;
stop)
  kill $(cat $pidfile)
  rm -f $pidfile ;;
esac
"""


@pytest.mark.parametrize("is_named", [True, False], ids=["named by the pidfile", "without a pidfile"])
async def test_deployment_after_a_failed_pre_start_runs_one_server_that_never_restarts(
    world: JobTree, is_named: bool
) -> None:
    """If the failed pre-start's process kept its port, bosh-dns's health check would be restarted again and
    again.
    """
    port, failed = free_port(), world.base / "failed"
    ctl = world.script("health", "ctl", SERVER_CTL.format(server=shlex.join([sys.executable, "-c", SERVER]), port=port))
    forget = "" if is_named else f"rm {world.pidfile('health')}; "
    world.script("dns", "pre-start", f"{ctl} start; [ -e {failed} ] || {{ touch {failed}; {forget}exit 1; }}")
    programs = f'start program "{ctl} start"\n stop program "{ctl} stop"'
    text = f"check process health with pidfile {world.pidfile('health')}\n {programs}\n group vcap\n"
    async with world.supervising() as supervisor:
        with pytest.raises(ActionError):
            await run_script(world, supervisor, "pre-start", "dns")
        await until(lambda: is_open(port))
        await supervisor.configure([JobFile("dns", "", text)])
        await supervisor.stop(wait=True)
        assert not is_open(port)

        await run_script(world, supervisor, "pre-start", "dns")
        await supervisor.start()
        await in_state(supervisor, "health", "running")
        await until(lambda: is_open(port))
        shown = info(supervisor, "health")
        assert (shown.pid, shown.restarts) == (number_in(world.pidfile("health")), 0)
        assert supervisor.job_state() == "running"
        assert world.lines() == ["start", "start"]
        assert world.events == []
        await supervisor.stop(wait=True)

        assert not is_open(port)


def is_open(port: int) -> bool:
    """Return True if a server is listening on ``port``."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
async def test_pidfile_naming_a_process_started_by_a_script_of_another_job_is_ignored(world: JobTree) -> None:
    other = world.base / "other.number"
    dns(world, f"setsid sleep 600 & echo $! >{other}")
    async with world.supervising() as supervisor:
        await run_script(world, supervisor, "pre-start")
        pid = await until(lambda: number_of_program(other, "sleep"))
        liar = world.job("liar", f"cp {other} $pidfile", "exit 0", timeout=1)
        await supervisor.configure([liar])
        await supervisor.start()
        shown = await in_state(supervisor, "liar", "down")
        refused = f"the pidfile names process {pid} (sleep): it "
        assert refused + "belongs to scripts of job bosh-dns" in shown.reason or refused + "was not" in shown.reason
        assert is_alive(pid)
