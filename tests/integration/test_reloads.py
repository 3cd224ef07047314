"""A rule, another job or an operator reloads a service, which replaces the service's main process."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from agent_shim.core.errors import ActionError
from agent_shim.supervisor.supervisor import JobFile
from tests.support.programs import foreign, is_alive, number_in, number_of_program
from tests.support.programs.jobs import JobTree, in_state, info, program
from tests.support.waiting import until

START = "echo start >>$log; {daemon}"
WAIT = "until new=$(cat $pidfile); [ ${{new:-$old}} != $old ]; do sleep 0.02; done"
RELOADS = {
    "forks twice": "old=$(cat $pidfile); {daemon}; " + WAIT,
    "stays a child": "old=$(cat $pidfile); sleep 600 & echo $! >$pidfile",
}


def proxy(world: JobTree, reload: str, *, is_of_another_job: bool = False) -> list[JobFile]:
    """Return a ``haproxy`` job and a rule that runs the ``reload`` script when a file changes (cf-release#926)."""
    daemon = program("fork_twice.py", world.pidfile("haproxy"))
    job = world.job("haproxy", START.format(daemon=daemon), "exit 0", timeout=2)
    script = world.script("haproxy", "reload", reload.format(daemon=daemon))
    (world.base / "conf").touch()
    rule = f"""
    check file conf with path {world.base}/conf
      if changed timestamp then exec "{script}"
      group vcap
    """
    if is_of_another_job:
        return [job, JobFile("helper", "", rule)]
    return [JobFile("haproxy", "", job.text + rule)]


@pytest.mark.parametrize(
    ("how", "old", "is_of_another_job"),
    [
        pytest.param("forks twice", "ends", False, id="rule"),
        pytest.param("forks twice", "stays", True, id="rule of another job"),
        pytest.param("stays a child", "stays", False, id="child of a rule"),
    ],
)
async def test_process_that_replaces_the_main_process_in_a_reload_is_adopted(
    world: JobTree, how: str, old: str, is_of_another_job: bool
) -> None:
    # A daemon empties its pidfile before it writes its pid. Leave enough time between two checks so that even on a
    # busy machine at most one of them sees the empty file.
    world.timing = msgspec.structs.replace(world.timing, look=0.5)
    reload = RELOADS[how] + ("; kill $old" if old == "ends" else "")
    async with world.checking(*proxy(world, reload, is_of_another_job=is_of_another_job)) as supervisor:
        found = [(await in_state(supervisor, "haproxy", "running")).pid]
        await until(lambda: info(supervisor, "conf").state == "running" and supervisor.job_state() == "running")
        await asyncio.sleep(2 * world.timing.cycle)
        for number in (1, 2):
            os.utime(world.base / "conf", ns=(0, number))
            await until(lambda: info(supervisor, "haproxy").pid not in (0, *found))
            found.append(info(supervisor, "haproxy").pid)
        assert found[-1] == number_in(world.pidfile("haproxy"))
        await in_state(supervisor, "haproxy", "running")
        # Wait until the script has terminated the old process. The supervisor may see the new pid before the script
        # reads it.
        await until(lambda: [is_alive(pid) for pid in found] == [old == "stays", old == "stays", True])
        await supervisor.stop(wait=True)

        assert world.lines() == ["start"]
        assert not any(map(is_alive, found))
        assert ("haproxy", "alert") in world.told("PID changed")


async def test_stop_reports_and_spares_an_unrelated_process_that_the_pidfile_names(world: JobTree) -> None:
    other = world.base / "other.pid"
    helper = world.job("helper", f"sleep 600 & echo $! >{other}; echo $$ >$pidfile; exec sleep 600")
    web = world.job("web", "echo $$ >>$log; echo $$ >$pidfile; exec sleep 600", "kill $(cat $log)")
    async with world.checking(web, helper) as supervisor:
        await in_state(supervisor, "web", "running")
        pid = await until(lambda: number_of_program(other, "sleep"))
        world.pidfile("web").write_text(f"{pid}\n")
        await asyncio.sleep(2 * world.timing.cycle)
        await supervisor.stop_one("web")
        await in_state(supervisor, "web", "stopped")

        said = f"stopped, but the pidfile names process {pid} (sleep): it belongs to helper; it still runs"
        assert [each.description for each in world.events if each.event == "Execution failed"] == [said]
        assert is_alive(pid)


async def test_process_started_by_an_operator_is_adopted_but_never_signalled(world: JobTree) -> None:
    """The stop fails if the stop program leaves the process running."""
    web = world.job("web", "echo start >>$log; echo $$ >$pidfile; exec sleep 600", "exit 0", timeout=1)
    async with world.checking(web) as supervisor:
        old = (await in_state(supervisor, "web", "running")).pid
        command = "/bin/sh", "-c", "while :; do sleep 600; done", world.base / "web"
        by_hand = foreign(*command, TEST_OF=str(world.base), PATH="/bin")
        world.pidfile("web").write_text(f"{by_hand}\n")
        os.kill(old, signal.SIGTERM)
        await until(lambda: info(supervisor, "web").pid == by_hand)
        with pytest.raises(ActionError, match=rf"cannot end {by_hand} \(sh\)"):
            await supervisor.stop(wait=True)

        assert is_alive(by_hand)
        assert world.lines() == ["start"]
