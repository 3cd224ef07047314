"""Tests keepers that were killed by root or by the agent's user. A service must not be reported as stopped while its
processes may still be running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from agent_shim.core.errors import ActionError
from agent_shim.host import clock, keeper, proc, process, reaper
from agent_shim.supervisor.supervisor import Supervisor
from tests.support.programs import is_alive, kill, number_in, number_of_program
from tests.support.programs.jobs import LASTING, JobTree, in_state, info
from tests.support.waiting import until

HIDDEN = "(setsid sh -c 'echo $$ >{child}.new; mv {child}.new {child}; exec env -i sleep 600' &)"


def keeper_of(supervisor: Supervisor) -> int:
    (kept,) = supervisor.keepers.of(["web"])
    return kept.pid


async def test_service_fails_and_cannot_be_stopped_while_processes_of_its_killed_keeper_remain(world: JobTree) -> None:
    """Once the processes that may belong to the service have exited, the stop must succeed."""
    child = world.base / "child"
    job = world.job("web", f"{HIDDEN.format(child=child)}; echo $$ >$pidfile; {LASTING}")
    async with world.supervising(job) as supervisor:
        main = (await in_state(supervisor, "web", "running")).pid
        hidden = await until(lambda: number_of_program(child, "sleep"))
        os.kill(keeper_of(supervisor), signal.SIGKILL)

        await until(lambda: world.told("Execution failed"))
        found = info(supervisor, "web")
        assert found.process.state == "failing"
        assert "the keeper of its processes was killed" in found.reason
        assert f"{hidden} (sleep)" in found.reason
        assert f"{hidden} (sleep)" in world.events[0].description
        with pytest.raises(ActionError, match=rf"cannot end {hidden} \(sleep\)"):
            await supervisor.stop(wait=True)
        assert [is_alive(main), is_alive(hidden)] == [False, True]

        kill(hidden)
        await until(lambda: not is_alive(hidden))
        await supervisor.stop(wait=True)
        assert info(supervisor, "web").state == "stopped"


@pytest.mark.parametrize("set_back_s", [0, 3600])
async def test_next_agent_detects_a_killed_keeper(
    world: JobTree, monkeypatch: pytest.MonkeyPatch, set_back_s: int
) -> None:
    """This must also work if the machine's clock is set back before the next agent starts."""
    child = world.base / "child"
    job = world.job("web", f"{HIDDEN.format(child=child)}; echo $$ >$pidfile; {LASTING}")
    with reaper.reaping():
        async with world.supervisor() as supervisor:
            await supervisor.configure([job])
            await supervisor.start()
            await in_state(supervisor, "web", "running")
            hidden = await until(lambda: number_of_program(child, "sleep"))
            kept = keeper_of(supervisor)
        os.kill(kept, signal.SIGKILL)
        monkeypatch.setattr(clock, "wall_time", lambda now=clock.wall_time: now() - set_back_s)
        async with world.supervisor() as supervisor:
            await supervisor.recover()
            await in_state(supervisor, "web", "running")
            with pytest.raises(ActionError, match=rf"cannot end .*\b{hidden} \(sleep\)"):
                await supervisor.stop(wait=True)
            kill(hidden)


async def test_service_without_child_processes_can_be_stopped_after_its_keeper_was_killed(world: JobTree) -> None:
    async with world.supervising(world.job("web")) as supervisor:
        pid = (await in_state(supervisor, "web", "running")).pid
        os.kill(keeper_of(supervisor), signal.SIGKILL)
        await until(lambda: world.told("Execution failed"))

        await supervisor.stop(wait=True)

        assert (info(supervisor, "web").state, is_alive(pid)) == ("stopped", False)


async def test_agent_reconnects_to_a_keeper_that_has_accepted_another_client(world: JobTree) -> None:
    """A keeper serves only the client that connected last, and any root process can connect to its socket."""
    child = world.base / "child"
    job = world.job("web", f"{HIDDEN.format(child=child)}; echo $$ >$pidfile; {LASTING}")
    async with world.supervising(job) as supervisor:
        running = await in_state(supervisor, "web", "running")
        hidden = await until(lambda: number_of_program(child, "sleep"))
        keeper.living(world.paths.keepers)

        await supervisor.stop(wait=True)

        assert [is_alive(running.pid), is_alive(hidden)] == [False, False]
        assert not world.told("Execution failed")


async def test_stop_fails_while_another_client_repeatedly_replaces_the_agent_at_a_keeper(
    world: JobTree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent must not reconnect forever."""
    monkeypatch.setattr(keeper, "RECONNECT_PAUSE_S", 3600)
    child = world.base / "child"
    job = world.job("web", f"{HIDDEN.format(child=child)}; echo $$ >$pidfile; {LASTING}")
    async with world.supervising(job) as supervisor:
        await in_state(supervisor, "web", "running")
        hidden = await until(lambda: number_of_program(child, "sleep"))
        kept = keeper_of(supervisor)
        keeper.living(world.paths.keepers)
        await until(lambda: "connected again" in caplog.text)
        keeper.living(world.paths.keepers)

        with pytest.raises(ActionError, match=rf"cannot end {kept} \(keeper\)"):
            await supervisor.stop(wait=True)
        assert is_alive(hidden)


async def test_next_agent_learns_the_status_of_a_process_that_exited_while_no_agent_ran(world: JobTree) -> None:
    with reaper.reaping():
        async with world.supervisor() as supervisor:
            await supervisor.configure([world.job("web", None, None)])
            await supervisor.start()
            pid = (await in_state(supervisor, "web", "running")).pid
        os.kill(pid, signal.SIGUSR1)
        await until(lambda: not is_alive(pid))
        async with world.supervisor() as supervisor:
            await supervisor.recover()
            found = await in_state(supervisor, "web", "down")

            assert found.last_exit == "SIGUSR1"
            await supervisor.stop(wait=True)


async def test_next_agent_does_not_mistake_itself_for_an_orphan(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orphans are children of PID 1, but under systemd, so is the agent itself."""
    job = world.job("web")
    with reaper.reaping():
        async with world.supervisor() as supervisor:
            await supervisor.configure([job])
            await supervisor.start()
            await in_state(supervisor, "web", "running")
            kept = keeper_of(supervisor)
        os.kill(kept, signal.SIGKILL)
        (socket,) = world.paths.keepers.iterdir()
        os.utime(socket, (1, 1))
        itself = proc.stat(os.getpid())
        assert itself is not None
        monkeypatch.setattr(proc, "table", lambda: {os.getpid(): msgspec.structs.replace(itself, parent=1)})
        async with world.supervisor() as supervisor:
            await supervisor.recover()

            await supervisor.stop(wait=True)


async def test_stop_fails_while_processes_of_a_keeper_killed_during_the_start_remain(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = world.base / "keeper"
    killed.write_text(
        f"#!{sys.executable}\nimport os, pathlib, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path('{world.base}/child').write_text(f'{{child.pid}}\\n')\nos.kill(os.getpid(), 9)\n"
    )
    killed.chmod(0o755)
    monkeypatch.setattr(keeper, "PROGRAM", killed)
    async with world.supervising(world.job("web")) as supervisor:
        await in_state(supervisor, "web", "down")
        child = await until(lambda: number_in(world.base / "child"))
        with pytest.raises(ActionError, match=rf"cannot end .*\b{child} \(sleep\)"):
            await supervisor.stop(wait=True)
        kill(child)


async def test_hanging_keeper_start_fails_the_stop_and_is_not_retried(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file server with the keeper program does not respond, the keeper may still start once the server is
    back.
    """
    hanging = world.base / "keeper"
    hanging.write_text(f"#!/bin/sh\necho $$ >>{world.log}\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(keeper, "ANSWER_TIMEOUT_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(keeper, "PROGRAM", hanging)
        patched.setattr(keeper, "START_TIMEOUT_S", 0.1)
        async with world.supervising(world.job("web")) as supervisor:
            await until(lambda: "does not answer" in info(supervisor, "web").reason)
            patched.undo()
            with pytest.raises(ActionError, match=r"cannot end \d+ \(the keeper of web, which does not answer\)"):
                await supervisor.stop(wait=True)
            (pid,) = map(int, world.lines())
            kill(pid)
            await until(lambda: not is_alive(pid))
            await supervisor.stop(wait=True)


async def test_stop_fails_while_a_keeper_from_an_earlier_agent_cannot_be_reached(world: JobTree) -> None:
    (world.base / "files.json").write_bytes(msgspec.json.encode([world.job("web")]))
    command = [sys.executable, "-m", "tests.support.programs.agent", str(world.base)]
    env = {"TEST_OF": str(world.base), "PATH": os.environ["PATH"]}
    state = world.paths.supervisor_state
    with reaper.reaping():
        agent = process.spawn(command, env=env, cwd=Path.cwd())
        await until(lambda: state.exists() and b'"running"' in state.read_bytes())
        agent.send(signal.SIGKILL)
        await agent.wait()
        (kept,) = keeper.living(world.paths.keepers)
        (path,) = world.paths.keepers.iterdir()
        hidden = path.rename(world.base / "hidden")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wrong:  # Keepers use a different socket type.
            with contextlib.chdir(path.parent):  # The absolute path may be too long for a socket.
                wrong.bind(path.name)
            async with world.supervisor() as supervisor:
                await supervisor.recover()
                with pytest.raises(ActionError, match=rf"cannot end .*\b{kept.keeper} \(keeper\)"):
                    await supervisor.stop(wait=True)
        path.unlink()
        hidden.rename(path)
