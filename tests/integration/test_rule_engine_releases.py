"""Tests rules from public releases, and host and file checks. The tests compare the resulting states, alerts, program
runs and restarts.

If a test follows a release's monit file, its docstring names the release.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest

from agent_shim.edges.alerts import alert_of
from agent_shim.edges.monit_text import words
from agent_shim.supervisor import monit_api
from agent_shim.supervisor.supervisor import JobFile, Supervisor
from tests.support.programs.jobs import JobTree, in_state, info
from tests.support.serving import serving
from tests.support.waiting import until


class Web:
    """A web server that can be stopped and started again on the same port."""

    def __init__(self) -> None:
        self.status = "200 OK"
        self.heard: list[bytes] = []
        self._serving = contextlib.AsyncExitStack()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    async def open(self) -> None:
        await self._serving.enter_async_context(serving(self._serve, port=self.port))

    async def close(self) -> None:
        await self._serving.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            self.heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(f"HTTP/1.1 {self.status}\r\nContent-Length: 0\r\n\r\n".encode())


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    found = Web()
    yield found
    await found.close()


def states(supervisor: Supervisor) -> dict[str, str]:
    """Return the states that ``get_state`` reports."""
    return {process.name: process.state for process in supervisor.processes()}


# --- hosts ------------------------------------------------------------------------------------------------------------


async def test_host_check_for_a_dead_haproxy_fails_the_instance(world: JobTree, web: Web) -> None:
    """In haproxy-boshrelease, the instance is failing if the health page does not answer, even if the process is up."""
    health = f"""
    check host haproxy-health with address localhost
      if failed host localhost port {web.port} protocol http and request "/health"
        with timeout 5 seconds
        for 2 cycles
      then alert
      depends on haproxy
      group vcap
    """
    proxy = world.job("haproxy")
    async with world.checking(JobFile("haproxy", "", proxy.text + health)) as supervisor:
        await until(lambda: supervisor.job_state() == "failing")

        assert states(supervisor) == {"haproxy": "running", "haproxy-health": "failing"}
        assert world.told("Connection failed") == [("haproxy-health", "alert")]
        event = world.events[-1]
        assert alert_of(event.service, event.event, event.action, event.description, [], 0.0)
        await web.open()
        await until(lambda: supervisor.job_state() == "running")

        assert web.heard[-1].startswith(f"GET /health HTTP/1.1\r\nHost: localhost:{web.port}\r\n".encode())
        assert world.told("Connection succeeded") == [("haproxy-health", "alert")]
        web.status = "503 Service Unavailable"
        await until(lambda: supervisor.job_state() == "failing")


async def test_host_check_counts_as_starting_until_it_has_run_once(world: JobTree, web: Web) -> None:
    """The Director relies on the first ``running`` that it sees."""
    text = f"check host far with address 127.0.0.1\n if failed port {web.port} then alert\n group vcap\n"
    async with world.supervising(JobFile("far", "", text)) as supervisor:
        await in_state(supervisor, "far", "running")

        assert supervisor.job_state() == "starting"
        await supervisor.unmonitor_one("far")
        await supervisor.start_one("far")
        assert supervisor.job_state() == "starting"


async def test_host_check_restarts_its_service_in_each_failing_cycle(world: JobTree, web: Web) -> None:
    """app-autoscaler's scheduler uses the rule ``check host … if failed url … then restart``."""
    start, stop = (world.script("health", verb, f"echo {verb} >>$log") for verb in ("start", "stop"))
    text = f"""
    check host scheduler-health with address localhost
      start program "{start}"
      stop program "{stop}"
      if failed url http://localhost:{web.port}/health with timeout 5 seconds for 2 cycles then restart
      group vcap
    check host other-health with address localhost
      if failed url http://localhost:{web.port}/health with timeout 5 seconds for 2 cycles then restart
      group vcap
    """
    async with world.checking(JobFile("scheduler", "", text)) as supervisor:
        await until(lambda: world.lines().count("start") >= 3)

        assert world.lines()[:5] == ["start", "stop", "start", "stop", "start"]
        await until(lambda: states(supervisor)["other-health"] == "failing")
        assert set(world.told("Connection failed")) == {("scheduler-health", "restart"), ("other-health", "restart")}
        await web.open()
        await until(lambda: supervisor.job_state() == "running")


async def test_failing_host_check_restarts_its_dependents(world: JobTree, web: Web) -> None:
    text = f"check host far with address 127.0.0.1\n if failed port {web.port} then restart\n group vcap\n"
    start = "echo start >>$log; echo $$ >$pidfile; exec sleep 600"
    job = world.job("web", start, "kill $(cat $pidfile)", "depends on far")
    async with world.checking(JobFile("far", "", text), job):
        await until(lambda: world.lines().count("start") >= 2)

        assert world.told("Connection failed") == [("far", "restart")]


async def test_host_check_skips_port_checks_if_ping_fails(
    world: JobTree, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["no answer"]

    async def echo(*_: object) -> str:
        return answers[0]

    monkeypatch.setattr("agent_shim.supervisor.network_checks.echo", echo)
    await web.open()
    text = f"""
    check host far with address 127.0.0.1
      if failed icmp type echo count 3 with timeout 3 seconds then alert
      if failed port {web.port} protocol http then alert
      group vcap
    """
    async with world.checking(JobFile("far", "", text)) as supervisor:
        await until(lambda: states(supervisor)["far"] == "failing")

        assert info(supervisor, "far").faults == ("ICMP failed",)
        assert web.heard == []
        answers[0] = ""
        await until(lambda: states(supervisor)["far"] == "running")
        assert web.heard


# --- process connections ----------------------------------------------------------------------------------------------


async def test_failed_url_check_restarts_a_process(world: JobTree, web: Web) -> None:
    """The rule comes from swarm_manager in docker-boshrelease: ``if (failed url … ) then restart``."""
    await web.open()
    rule = f"if (failed url http://127.0.0.1:{web.port}/info and content != 'x' for 2 cycles) then restart"
    async with world.checking(world.job("manager", None, "kill $(cat $pidfile)", rule)) as supervisor:
        first = (await in_state(supervisor, "manager", "running")).pid
        await until(lambda: len(web.heard) > 3)
        assert info(supervisor, "manager").pid == first
        web.status = "500 Oh"
        await until(lambda: info(supervisor, "manager").pid not in (0, first))

        assert world.told("Connection failed") == [("manager", "restart")]


async def test_closed_udp_port_restarts_a_process(world: JobTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule comes from ingestor_syslog in logsearch: ``if failed port … type udp``."""
    monkeypatch.setattr("agent_shim.supervisor.network_checks.REFUSAL_S", 0.1)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    rule = f"if failed host 127.0.0.1 port {server.getsockname()[1]} type udp then restart"
    async with world.checking(world.job("syslog", None, "kill $(cat $pidfile)", rule)) as supervisor:
        with server:
            first = (await in_state(supervisor, "syslog", "running")).pid
            server.settimeout(30)
            assert [await asyncio.to_thread(server.recv, 10) for _ in range(2)] == [b"\0", b"\0"]
        await until(lambda: info(supervisor, "syslog").pid not in (0, first))

        assert ("syslog", "restart") in world.told("Connection failed")


# --- files ------------------------------------------------------------------------------------------------------------


async def test_changed_file_runs_a_program_with_monit_variables(world: JobTree) -> None:
    """The rule comes from nginx in prometheus-boshrelease: ``if changed timestamp then exec``."""
    hosts = world.base / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    body = 'echo "$MONIT_SERVICE: $MONIT_EVENT: $MONIT_DESCRIPTION" >>$log'
    text = f"""
    check file hosts with path {hosts}
      if changed timestamp then exec "{world.script("hosts", "reload", body)}"
      group vcap
    """
    async with world.checking(JobFile("nginx", "", text)) as supervisor:
        await until(lambda: supervisor.job_state() == "running")
        await asyncio.sleep(3 * world.timing.cycle)
        assert world.lines() == []
        for number in (1, 2):
            os.utime(hosts, ns=(0, number))
            await until(lambda number=number: len(world.lines()) == number)  # type: ignore[misc]

        assert world.lines() == [f"hosts: Timestamp changed: timestamp was changed for {hosts}"] * 2
        assert world.told("Timestamp changed") == [("hosts", "exec")] * 2
        # The check keeps failing until a cycle finds no further change.
        await until(lambda: supervisor.job_state() == "running")
        assert world.told("Timestamp succeeded") == []


async def test_job_is_failing_while_a_file_exceeds_its_size_limit(world: JobTree) -> None:
    """The rule comes from queue in logsearch: ``if size > …``."""
    dump = world.base / "dump.rdb"
    dump.write_bytes(bytes(100))
    text = f"check file dump with path {dump}\n if size > 1 kb for 2 cycles then alert\n group vcap\n"
    async with world.checking(JobFile("queue", "", text)) as supervisor:
        await until(lambda: supervisor.job_state() == "running")
        dump.write_bytes(bytes(2000))
        await until(lambda: supervisor.job_state() == "failing")

        assert info(supervisor, "dump").reason == "size of 2000 B matches the resource limit > 1024 B"
        assert info(supervisor, "dump").faults == ("Size failed",)
        assert world.told("Size failed") == [("dump", "alert")]
        dump.write_bytes(b"")
        await until(lambda: supervisor.job_state() == "running")
        assert world.told("Size succeeded") == [("dump", "alert")]


async def test_file_check_restarts_its_service_if_the_path_is_a_directory(world: JobTree) -> None:
    """As in monit, every file, directory or FIFO check implicitly has a rule that restarts the service if the path
    has the wrong type.
    """
    pid = world.base / "run"
    stop, start = (
        world.script("run", verb, body) for verb, body in (("stop", f"rmdir {pid}"), ("start", f"touch {pid}"))
    )
    text = f'check file run with path {pid}\n start program "{start}"\n stop program "{stop}"\n group vcap\n'
    async with world.checking(JobFile("run", "", text)) as supervisor:
        await until(lambda: supervisor.job_state() == "running")
        pid.unlink()
        pid.mkdir()
        await until(lambda: world.told("Type succeeded"))

        assert world.told("Invalid type") == [("run", "restart")]
        await until(lambda: supervisor.job_state() == "running")


async def test_missing_file_is_created_by_its_start_program(world: JobTree) -> None:
    """As under monit, a check works without a stop program. capi-release (nfs_mounter) and os-conf-release (iptables)
    have such checks.
    """
    crontab = world.base / "crontab"
    start = world.script("mounter", "start", f"echo start >>$log; touch {crontab}")
    text = f'check file mounter path {crontab}\n start program "{start}"\n group vcap\n'
    async with world.checking(JobFile("mounter", "", text)) as supervisor:
        await until(lambda: supervisor.job_state() == "running")
        crontab.unlink()
        await until(crontab.exists)

        assert world.told("Does not exist") == [("mounter", "restart")]
        assert [each.description for each in world.events if each.event == "Does not exist"] == ["file doesn't exist"]


async def test_directory_check_without_programs_fails_while_the_directory_is_missing(world: JobTree) -> None:
    path = world.base / "store"
    text = f"check directory store path {path}\n group vcap\n"
    async with world.checking(JobFile("store", "", text)) as supervisor:
        for _ in range(2):
            await until(lambda: supervisor.job_state() == "failing")
            assert words(monit_api.describe(info(supervisor, "store"))) == "Does not exist"
            path.mkdir()
            await until(lambda: supervisor.job_state() == "running")
            path.rmdir()

        await until(lambda: supervisor.job_state() == "failing")

        store = info(supervisor, "store")
        assert (store.reason, store.last_exit, dict(store.exits)) == (
            f"{path} is missing; it is not restarted: it has no start program",
            "",
            {},
        )
        assert {each.event for each in world.events} == {"Does not exist", "Exists"}


async def test_match_rule_runs_its_program_for_each_new_line(world: JobTree) -> None:
    log = world.base / "app.log"
    log.write_text("error: old\n")
    body = 'echo "$MONIT_DESCRIPTION" >>$log'
    text = f"""
    check file app with path {log}
      if match "^error" then exec "{world.script("app", "seen", body)}"
      ignore match "harmless"
      group vcap
    """
    async with world.checking(JobFile("app", "", text)) as supervisor:
        await until(lambda: supervisor.job_state() == "running")
        with log.open("a") as writer:
            writer.write("error: one\nfine\nerror: harmless\nerror: two\nerror: half")
        await until(lambda: len(world.lines()) == 2)

        assert sorted(world.lines()) == ["content matches [error: one]", "content matches [error: two]"]
        # As in monit, the check keeps failing until a line is added that does not match.
        assert supervisor.job_state() == "failing"
        with log.open("a") as writer:
            writer.write(" a line\nfine\n")
        await until(lambda: supervisor.job_state() == "running")
        await until(lambda: len(world.lines()) == 3)
