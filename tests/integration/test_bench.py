"""``./dev bench``, with agents that are none."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import proc
from benchmarks import boots, light
from benchmarks.__main__ import measure
from benchmarks.go_agent import SCRIPT
from benchmarks.idle import free_port
from benchmarks.measuring import Figures, figure
from benchmarks.world import COMMAND, World, world
from tests.support.waiting import until


async def good(command: str, scale: float, found: Figures) -> None:
    found["good"] = figure([scale], "s")


async def half(command: str, scale: float, found: Figures) -> None:
    found["half"] = figure([scale], "s")
    raise TimeoutError


async def test_a_part_that_fails_keeps_what_it_has_and_stops_no_other() -> None:
    figures, missing = await measure("agent", {"half": half, "good": good}, 1.0)
    assert {name: found["part"] for name, found in figures.items()} == {"half": "half", "good": "good"}
    assert missing == {"half": "TimeoutError in __main__.measure"}


async def test_an_agent_that_ends_at_once_is_reported_with_its_last_words() -> None:
    with pytest.raises(HostError, match="it has ended: no such bus"):
        async with world("sh -c 'echo no such bus >&2; exit 1'") as w:
            await w.start_agent()


async def test_a_pipe_in_the_place_of_a_pidfile_is_not_waited_for() -> None:
    async with world("sleep 1000") as w:
        for job in ("piped", "linked", "web"):
            (w.base / "data/sys/run" / job).mkdir(parents=True)
        os.mkfifo(w.base / "data/sys/run/piped/piped.pid")
        (w.base / "data/sys/run/linked/linked.pid").symlink_to("nowhere")
        # Above any number that is given: the world ends at its end what these name.
        (w.base / "data/sys/run/web/web.pid").write_text("99999999\n")

        assert await asyncio.wait_for(asyncio.to_thread(w.pids), 10) == {"web": 99999999}


async def test_what_runs_beside_an_agent_is_measured_with_it_and_ends_with_the_world() -> None:
    keeper = (
        "mkdir beside; setsid sleep 1000 & echo $! >one; cp one beside/group; mv one beside/one.pid; exec sleep 1000"
    )
    async with world(f'sh -c "{keeper}"') as w:
        w.exec_agent()
        await until((w.beside / "one.pid").exists)
        beside = proc.stat(int((w.beside / "one.pid").read_text()))
        assert beside is not None
        assert w.together() == [w.pid, beside.pid]
    await until(lambda: not ((now := proc.stat(beside.pid)) and now.is_alive and now.start_ticks == beside.start_ticks))


async def test_the_go_agent_has_one_monit_beside_it_that_is_restarted_when_it_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both programs are dummies here: the test is of the script between them."""
    monkeypatch.setenv("MONIT_PORT", (await free_port()).rpartition(":")[2])
    agent, monit = tmp_path / "agent", tmp_path / "monit"
    agent.write_text("#!/bin/sh\nexec sleep 1000\n")
    monit.write_text('#!/bin/sh\necho $$ >"$(sed -n "s/^set pidfile //p" "$3")"\nexec sleep 1000\n')
    for program in (agent, monit):
        program.chmod(0o755)
    async with world(f"{SCRIPT} {agent} {monit} {{config}} {{base}}") as w:
        w.exec_agent()
        first, keeper = await beside(w, 0), (w.beside / "group").read_text()
        await w.kill_agent()
        w.exec_agent()
        await until(lambda: Path(f"/proc/{w.pid}/comm").read_text() == "sleep\n")
        assert (await beside(w, 0), (w.beside / "group").read_text()) == (first, keeper)
        assert await beside(w, first, says="Waiting for monit to reload: before=1") != first
        assert proc.stat(first) is None


async def beside(w: World, other_than: int, *, says: str = "") -> int:
    """The number of the monit once it is another one; the agent says something again and again until then."""
    async with asyncio.timeout(20):
        while True:
            with suppress(FileNotFoundError, ValueError):
                if (number := int((w.beside / "monit.pid").read_text())) != other_than:
                    return number
            if says:
                with (w.scratch / "agent.log").open("a") as log:
                    log.write(f"{says}\n")
            await asyncio.sleep(0.05)


async def test_a_second_go_agent_on_a_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would talk to the monit of the first."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MONIT_PORT", str(taken.getsockname()[1]))
        with pytest.raises(HostError, match="another one listens on port"):
            async with world(f"{SCRIPT} /bin/true /bin/true {{config}} {{base}}") as w:
                await w.start_agent()


async def test_boots_of_a_user_that_is_not_root_say_which_figure_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boots, "ROUNDS", 1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    figures, missing = await measure(COMMAND, {"boots": boots.measure}, 1.0)

    assert missing == {"boots": "exec to first pong as root: this user is not root"}
    assert {"exec_to_first_pong", "interpreter_with_asyncio_and_ssl"} <= figures.keys()


@pytest.mark.root
async def test_boots_of_root_have_the_figure_and_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boots, "ROUNDS", 1)
    figures, missing = await measure(COMMAND, {"boots": boots.measure}, 1.0)

    assert missing == {}
    assert figures["exec_to_first_pong_as_root"]["steps_ms"]


async def test_light_agents_come_back_after_an_outage() -> None:
    """Each with the certificate of its own user: the server would refuse any other's subscription."""
    point, cost = await light.outage(20, 1.0, 0.1)

    assert min(cost, point.handshake_cpu) > 0
    assert point.attempts > 1  # each was connected, and one of them at least tried while the server was away
    assert point.most_attempts_away >= 1
    assert point.curve is not None
    assert point.curve[-1][1] == 20
