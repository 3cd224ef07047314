"""Tests monit's HTTP API: the responses that the Go agent reads, the requests that galera-agent in pxc-release sends,
and access control.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import time
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from agent_shim.edges import monit_http
from agent_shim.supervisor import monit_api
from agent_shim.supervisor.supervisor import JobFile, Supervisor
from tests.support.instance import RunningAgent as Instance
from tests.support.ports import free_port
from tests.support.programs.jobs import JobTree, in_state, info
from tests.support.waiting import TIMEOUT_S, until

Where = tuple[str, int]
USER = "vcap:of-this-machine"


@pytest.fixture
def world(world: JobTree) -> JobTree:
    """Provide a scratch tree with a password file for the API."""
    world.paths.monit_user.write_text(f"{USER}\n")
    return world


@contextlib.asynccontextmanager
async def listening(world: JobTree, *files: JobFile) -> AsyncIterator[tuple[Supervisor, Where]]:
    """Run a supervisor with the jobs ``files``. Yield the supervisor and the address of its API."""
    async with world.checking(*files) as supervisor:

        async def ask(request: Mapping[str, Any]) -> dict[str, Any]:
            return await monit_api.answer(supervisor, request, obstacle="") | {"uptime_secs": 61}

        async with monit_http.listening("127.0.0.1:0", ask, monit_http.user_in(world.paths.monit_user)) as where:
            assert where is not None
            yield supervisor, where


async def call(
    where: Where, target: str, body: str = "", *, user: str = USER, headers: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Return the status and body of the response to a GET request, or to a POST request if there is a body."""
    reader, writer = await asyncio.open_connection(*where)
    lines = [f"{'POST' if body else 'GET'} {target} HTTP/1.1", "Host: localhost:2822", *headers]
    if user:
        lines.append(f"Authorization: Basic {base64.b64encode(user.encode()).decode()}")
    if body:
        lines += ["Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(body)}"]
    writer.write("\r\n".join([*lines, "", body]).encode())
    async with asyncio.timeout(10):
        answer = (await reader.read()).decode("latin-1")
    writer.close()
    head, _, content = answer.partition("\r\n\r\n")
    return int(head.split()[1]), content


async def status(where: Where, version: int = 2) -> ET.Element:
    code, text = await call(where, f"/_status{version if version > 1 else ''}?format=xml")
    assert code == 200
    assert "\n" not in text
    assert text.startswith('<?xml version="1.0" encoding="ISO-8859-1"?><monit')
    return ET.fromstring(text.encode("latin-1"))  # noqa: S314 - written by our server


def number(element: ET.Element, path: str) -> int:
    return int(element.findtext(path, "missing"))


# --- settings that the Go agent reads ---------------------------------------------------------------------------------


async def test_monit_xml_for_a_running_service_is_readable_by_the_go_agent(world: JobTree) -> None:
    """The Go agent parses the XML in jobsupervisor/monit/status.go."""
    async with listening(world, world.job("web"), world.job("db")) as (supervisor, where):
        pid = (await in_state(supervisor, "web", "running")).pid
        await in_state(supervisor, "db", "running")
        root = await status(where)
        services = {each.get("name"): each for each in root.findall("services/service")}
        web = services["web"]

        assert abs(int(root.get("incarnation", "")) - time.time()) < 3600
        assert root.get("version") == "5.2.5"
        assert [each.tag for each in web][:8] == [
            *("type", "collected_sec", "collected_usec", "status", "status_hint", "monitor", "monitormode"),
            "pendingaction",
        ]
        assert [number(web, name) for name in ("type", "status", "monitor", "pendingaction")] == [3, 0, 1, 0]
        assert number(web, "pid") == pid
        assert number(web, "uptime") >= 0
        assert number(web, "memory/kilobytetotal") > 0
        assert float(web.findtext("memory/percenttotal", "")) >= 0
        assert float(web.findtext("cpu/percenttotal", "")) >= 0
        assert web.find("status_message") is None
        assert [name for name in services if name and name.startswith("system_")] != []
        groups = root.findall("servicegroups/servicegroup")
        assert [(group.get("name"), [each.text for each in group]) for group in groups] == [("vcap", ["db", "web"])]


async def test_monit_xml_reports_file_fifo_and_host_checks_with_their_results(world: JobTree) -> None:
    path, pipe = world.base / "file", world.base / "pipe"
    path.touch()
    os.mkfifo(pipe)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        text = f"""
        check system ours
          if memory > 0 % then alert
        check host far with address 127.0.0.1
          if failed port {port} protocol http and request "/a b" then alert
        check file changing with path {path}
          if changed size then alert
        check fifo pipe with path {pipe}
          mode passive
        """
        async with listening(world, JobFile("job", "", text)) as (supervisor, where):
            await until(lambda: all(info(supervisor, name).faults for name in ("ours", "far")))
            await until(lambda: info(supervisor, "changing").process.state == "running")
            root = await status(where)
            ours, far, changing, passive = services = root.findall("services/service")

            assert [number(each, "type") for each in services] == [5, 4, 2, 6]
            assert [number(each, "status") for each in services[:3]] == [2, 32, 0]
            assert [number(each, "monitormode") for each in (ours, passive)] == [0, 1]
            assert ours.find("system/load/avg01") is not None
            assert [(each.tag, each.text) for each in far.findall("port/")] == [
                *(("hostname", "127.0.0.1"), ("portnumber", str(port)), ("request", "/a%20b"), ("protocol", "HTTP")),
                *(("type", "TCP"), ("responsetime", "-1.000")),
            ]
            # Keep changing the file, because the next check may clear the failure before the test can read it.
            async with asyncio.timeout(TIMEOUT_S):
                while (number(changing, "status"), number(changing, "status_hint")) != (16, 16):
                    with path.open("a") as file:
                        file.write("x")
                    _, _, changing, _ = (await status(where)).findall("services/service")


async def test_monit_xml_for_dead_and_failing_services_contains_status_and_message(world: JobTree) -> None:
    files = [
        world.job("dead", "echo 'no ]]> <way>' >&2; exit 1"),
        JobFile("broken", "", "check process broken with <nonsense>"),
        world.job("fat", None, "exit 0", "if memory > 1 kb then alert"),
    ]
    async with listening(world, *files) as (supervisor, where):
        await in_state(supervisor, "dead", "down")
        await until(lambda: info(supervisor, "fat").faults)
        found = {each.get("name"): each for each in (await status(where)).findall("services/service")}

        assert number(found["dead"], "status") in (0x1200, 0x200)
        assert "no ]] > <way>" in found["dead"].findtext("status_message", "")
        assert found["dead"].find("pid") is None
        assert number(found["broken"], "status") == 0x1000
        assert number(found["fat"], "status") == 2
        assert "memory of" in found["fat"].findtext("status_message", "")


# --- pxc --------------------------------------------------------------------------------------------------------------


def of_galera(root: ET.Element, name: str) -> str:
    """Return the state that galera-agent would derive from version 1 of the XML (galera-healthcheck/monit_client)."""
    service = next(each for each in root.findall("service") if each.findtext("name") == name)
    if number(service, "pendingaction"):
        return "pending"
    return {0: "stopped", 2: "starting"}.get(
        number(service, "monitor"), "failing" if number(service, "status") else "running"
    )


async def test_galera_agent_stops_and_starts_its_service_over_monit_http(world: JobTree) -> None:
    """galera-agent posts the action, looks for certain words in the response, and polls the status until the action is
    done.
    """
    async with listening(world, world.job("galera-init"), world.job("other")) as (supervisor, where):
        await in_state(supervisor, "galera-init", "running")
        assert of_galera(await status(where, 1), "galera-init") == "running"
        for action, state in (("stop", "stopped"), ("start", "running")):
            code, page = await call(where, "/galera-init", f"action={action}")
            assert code == 200
            assert f"{action} pending" in page
            async with asyncio.timeout(TIMEOUT_S):
                while (found := of_galera(await status(where, 1), "galera-init")) != state:
                    assert found in ("pending", "starting")
                    await asyncio.sleep(0.01)
        version_1 = await status(where, 1)

        assert of_galera(version_1, "other") == "running"
        assert version_1.attrib == {}
        assert [each.tag for each in version_1][:3] == ["server", "platform", "service"]
        assert version_1.findtext("server/version") == "5.2.5"
        assert version_1.findall("service")[0].get("type") == "3"


async def test_monit_http_shows_services_and_executes_or_rejects_actions(world: JobTree) -> None:
    async with listening(world, world.job("web")) as (supervisor, where):
        first = (await in_state(supervisor, "web", "running")).pid
        summary = "Process 'web'                       running"
        assert summary in (await call(where, "/_status?format=text&level=summary"))[1]
        assert "memory kilobytes total" in (await call(where, "/_status"))[1]
        assert "<td>web</td><td>running</td>" in (await call(where, "/"))[1]
        assert "running" in (await call(where, "/web"))[1]
        assert (await call(where, "/unknown"))[0] == 404
        reader, writer = await asyncio.open_connection(*where)
        user = base64.b64encode(USER.encode()).decode()
        lines = ["GET /_status?format=text&level=summary HTTP/1.0", f"Authorization: Basic {user}", "", ""]
        writer.write("\r\n".join(lines).encode())
        assert (await reader.readline()).startswith(b"HTTP/1.0 200")
        writer.close()

        assert (await call(where, "/web", "action=unmonitor"))[0] == 200
        await in_state(supervisor, "web", "unmonitored")
        assert (await call(where, "/WEB", "action=monitor"))[0] == 200
        assert (await in_state(supervisor, "web", "running")).pid == first
        assert (await call(where, "/web", "action=restart"))[0] == 200
        await until(lambda: info(supervisor, "web").pid not in (0, first))
        assert (await call(where, "/unknown", "action=start"))[0] == 404
        assert (await call(where, "/web", "action=explode"))[0] == 400
        assert (await call(where, "/web", "x=1"))[0] == 400
        # The monit command searches the HTML page for these words and prints them.
        assert "</h2>Invalid action<p>" in (await call(where, "/web", "action=explode"))[1]
        assert "</h2>You are not auth" in (await call(where, "/web", "action=stop", user=""))[1]


async def test_monit_http_accepts_each_action_for_the_system_service(world: JobTree) -> None:
    """In monit 5.2.5, ``monit stop all`` sends the action to each service in the control file, including the system
    service, which always exists.
    """
    machine = f"/system_{os.uname().nodename}"
    async with listening(world, world.job("web")) as (supervisor, where):
        await in_state(supervisor, "web", "running")
        for action in monit_http.ACTIONS:
            code, page = await call(where, machine, f"action={action}")
            assert (code, f"{action} pending" in page) == (200, True)
        assert (await call(where, machine, "action=explode"))[0] == 400
        assert info(supervisor, "web").state == "running"


# --- access -----------------------------------------------------------------------------------------------------------


@pytest.mark.attack("a job calls monit's port without the password")
async def test_monit_http_without_the_password_is_rejected(world: JobTree) -> None:
    async with listening(world, world.job("web")) as (supervisor, where):
        await in_state(supervisor, "web", "running")
        for user in ("", "vcap:random-password", "vcap:", "vcap", ":", "root:of-this-machine"):
            assert (await call(where, "/_status2?format=xml", user=user))[0] == 401, user
            assert (await call(where, "/web", "action=stop", user=user))[0] == 401, user
        assert info(supervisor, "web").state == "running"

        for content in (None, "", "\n", "no colon", "\xff"):
            world.paths.monit_user.unlink()
            if content is not None:
                world.paths.monit_user.write_text(content)
            for user in ("", ":", content or "x", (content or "x").strip()):
                assert (await call(where, "/_status2?format=xml", user=user))[0] == 401, (content, user)
            for odd in ("Basic", "Basic \xff", "Bearer x", "Basic ==="):
                headers = (f"Authorization: {odd}",)
                assert (await call(where, "/", user="", headers=headers))[0] == 401, (content, odd)
            world.paths.monit_user.touch()


@pytest.mark.attack("a job calls monit's port without the password")
async def test_monit_mail_port_greets_with_an_error_and_accepts_no_mail() -> None:
    """A CPI may connect to this port to find out whether the agent is alive, but jobs must not be able to send alerts
    through the port.
    """
    mail = b"From: monit@localhost\r\nService: web\r\nEvent: does not exist\r\nAction: alert\r\nDate: now\r\n\r\n.\r\n"
    async with monit_http.refusing_mail("127.0.0.1:0") as where:
        assert where is not None
        reader, writer = await asyncio.open_connection(*where)
        said = b""
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                writer.write(
                    b"HELO x\r\nMAIL FROM:<monit@localhost>\r\nRCPT TO:<postmaster@localhost>\r\nDATA\r\n" + mail
                )
                while data := await reader.read(1000):
                    said += data
        writer.close()

        assert said.startswith(b"554 ")
        assert said.count(b"\r\n") == 1


async def test_agent_listens_on_the_configured_monit_ports_and_keeps_its_password(instance: Instance) -> None:
    instance.write_settings()
    ports = free_port(), free_port()
    config = json.loads(instance.config.read_text())
    config["AgentShim"]["monit"] = {"http": f"127.0.0.1:{ports[0]}", "mail": f"127.0.0.1:{ports[1]}"}
    instance.config.write_text(json.dumps(config))
    await instance.start_agent()
    user_file = instance.base / "monit/monit.user"
    user = user_file.read_text().strip()
    code, _ = await call(("127.0.0.1", ports[0]), "/_status2?format=xml", user=user)
    reader, writer = await asyncio.open_connection("127.0.0.1", ports[1])
    greeting = await reader.readline()
    writer.close()
    await instance.stop_agent()
    await instance.start_agent()

    assert code == 200
    assert greeting.startswith(b"554 ")
    assert len(user) > len("vcap:") + 30
    assert user_file.stat().st_mode & 0o777 == 0o600
    assert user_file.read_text().strip() == user
