"""Tests release scripts that call ``monit``. Each test runs a script that uses this project's command in a different
way.

The scripts are modelled on those in gorouter, silk, capi, mariadb, logsearch, os-conf, kubo and fissile.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agent_shim.edges import control_server
from agent_shim.host import process
from agent_shim.supervisor import monit_api
from agent_shim.supervisor.supervisor import JobFile, Supervisor
from tests.support.programs.jobs import JobTree, in_state, info
from tests.support.waiting import until


@pytest.fixture
def world(world: JobTree) -> JobTree:
    """Provide a scratch tree with a script that runs the ``monit`` command for that tree."""
    monit = world.base / "monit.sh"
    monit.write_text(f'#!/bin/sh\nexec {sys.executable} -m agent_shim.cli.monit -b {world.base} "$@"\n')
    monit.chmod(0o755)
    return world


@contextlib.asynccontextmanager
async def answering(world: JobTree, *files: JobFile) -> AsyncIterator[Supervisor]:
    """Run a supervisor that checks rules, and answer requests from the ``monit`` command."""
    async with world.checking(*files) as supervisor:

        async def answer(request: dict[str, Any], *_: object) -> bytes:
            found = await monit_api.answer(supervisor, request, obstacle="")
            return msgspec.json.encode(found | {"pid": 1, "uptime_secs": 61})

        async with control_server.listening(world.paths.control_socket, answer):
            yield supervisor


async def script(world: JobTree, body: str) -> None:
    """Run a shell script that can call ``monit``, as an operator or a cron job would. Fail if its exit code is not
    0.
    """
    monit = f'monit() {{ {world.base}/monit.sh "$@"; }}'
    path = world.script("operator", "run", f"set -e\n{monit}\n{body}\necho done >>$log")
    out = world.base / "script.out"
    status = await process.spawn([str(path)], env={"PATH": "/bin:/usr/bin"}, stdout=out, stderr=out).wait()
    assert status == 0, out.read_text()
    assert world.lines()[-1] == "done"


async def test_scripts_can_wait_for_a_stop_and_a_start_with_monit_summary(world: JobTree) -> None:
    """A cron job stops a service and waits until the summary shows ``not monitored`` without ``pending``. It then
    starts the service and waits for ``running``.
    """
    slow = "sleep 0.3; kill $(cat $pidfile)"
    async with answering(world, world.job("archiver", None, slow), world.job("other")) as supervisor:
        before = (await in_state(supervisor, "archiver", "running")).pid
        await script(
            world,
            """
monit stop archiver
until monit summary | grep "'archiver'" | grep 'not monitored' | grep -v pending; do sleep 0.05; done
monit start archiver
until monit summary | grep "'archiver'" | grep running; do sleep 0.05; done
""",
        )

        assert info(supervisor, "archiver").pid not in (0, before)


async def test_monit_summary_line_for_an_unmonitored_service_ends_with_not_monitored(world: JobTree) -> None:
    """Scripts search the summary for ``not monitored *$`` before they call ``monitor``."""
    async with answering(world, world.job("worker")) as supervisor:
        before = (await in_state(supervisor, "worker", "running")).pid
        await script(
            world,
            """
monit unmonitor worker
tries=0
until monit summary | grep worker | grep -Eq 'not monitored *$'; do tries=$((tries + 1)); [ $tries -lt 200 ]; done
monit monitor worker
until monit start worker; do sleep 0.1; done
until monit summary | grep -Eq "^Process 'worker' +running$"; do sleep 0.05; done
""",
        )

        assert info(supervisor, "worker").pid == before


async def test_start_program_can_call_monit_summary(world: JobTree) -> None:
    start = f"""
{world.base}/monit.sh summary | grep -q "^Process[[:space:]]*'ipsec'" && echo with >>$log
{world.base}/monit.sh summary | grep "'mariadb'" >>$log
echo $$ >$pidfile
exec sleep 600"""
    async with answering(world, world.job("ipsec"), world.job("mariadb", start, timeout=60)) as supervisor:
        await in_state(supervisor, "mariadb", "running")

        title = "Process 'mariadb'"
        assert world.lines() == ["with", f"{title:<35} initializing - start pending"]


async def test_rule_program_can_restart_another_service_with_monit(world: JobTree) -> None:
    """A rule in gorouter's healthchecker job runs a program that restarts the router and waits until it is up."""
    restart = world.script(
        "healthchecker",
        "restart-router",
        f"""
{world.base}/monit.sh restart router
until {world.base}/monit.sh summary | grep router | grep -v healthchecker | grep running; do sleep 0.05; done
echo restarted >>$log""",
    )
    rule = f'if 1 restart within 1 cycles then exec "{restart}"'
    start = "echo $$ >$pidfile; exec sleep 600"
    files = [world.job("router"), world.job("router-healthchecker", start, "exit 0", rule)]
    world.timing = replace(world.timing, cycle=2)  # This is longer than a restart takes, even on a busy machine.
    async with answering(world, *files) as supervisor:
        before = (await in_state(supervisor, "router", "running")).pid
        await in_state(supervisor, "router-healthchecker", "running")
        checker = await asyncio.to_thread(world.pidfile("router-healthchecker").read_text)
        await script(world, f"kill {checker}")
        await until(lambda: "restarted" in world.lines())

        assert info(supervisor, "router").pid not in (0, before)


async def test_rule_program_can_restart_its_own_service_with_monit(world: JobTree) -> None:
    """The stop must not kill the program that requested the restart."""
    rule = f'if memory > 1 kb for 3 cycles then exec "{world.base}/monit.sh restart dns"'
    async with answering(world, world.job("dns", None, "kill $(cat $pidfile)", rule)) as supervisor:
        before = (await in_state(supervisor, "dns", "running")).pid
        await until(lambda: info(supervisor, "dns").pid not in (0, before))

        assert "Execution failed" not in [each.event for each in world.events]


async def test_repeated_monit_reload_changes_nothing(world: JobTree) -> None:
    """Some scripts call ``monit reload`` every minute, and some pass a name, which monit ignores."""
    async with answering(world, world.job("web")) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        await script(world, "for i in 1 2 3; do monit reload; monit reload web; done")

        assert info(supervisor, "web").pid == before
        assert world.events == []


async def test_container_scripts_can_count_services_with_monit_summary(world: JobTree) -> None:
    """A readiness script counts running services, and a stop script waits until all are ``not monitored``
    before it calls ``monit quit``.
    """
    async with answering(world, world.job("one"), world.job("two")) as supervisor:
        for name in ("one", "two"):
            await in_state(supervisor, name, "running")
        await script(
            world,
            """
[ "$(monit summary | awk '$1 == "Process"' | grep -c running)" = 2 ]
monit stop all
until [ "$(monit summary | awk '$1 == "Process"' | grep -ic 'not monitored$')" = 2 ]; do sleep 0.05; done
monit quit
""",
        )

        assert [service.state for service in supervisor.services()] == ["stopped", "stopped"]
