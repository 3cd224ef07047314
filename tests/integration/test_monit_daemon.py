"""Tests the daemon that replaces monit, run as a process with real jobs and a mail server: HTTP, mail, reloads,
restarts and exits.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from agent_shim.host import process
from tests.support import jobs, monitrc
from tests.support.ports import free_address
from tests.support.programs.jobs import JobTree
from tests.support.serving import serving
from tests.support.waiting import until

USER = "vcap:random-password"


class MonitTree:
    """monit's files in a scratch directory, and a daemon that reads them."""

    def __init__(self, base: Path, port: int, mail: int) -> None:
        self.world = JobTree(base)
        self.base, self.port, self.mail = base, port, mail
        self.control = base / "monitrc"
        http = f"port {port} and use address 127.0.0.1 allow cleartext {base}/monit/monit.user"
        self.control.write_text(monitrc.control(base / "monit", cycle=1, http=http, run=base, is_whole=True))
        (base / "monit/empty.monitrc").touch()
        (base / "monit/alerts.monitrc").write_text(monitrc.alerts(base / "monit", mail))
        (base / "monit/job").mkdir()
        (base / "monit/monit.user").write_text(USER)
        self.daemon: process.Process | None = None
        self.out = base / "out"

    def add(self, *names: str, start: str | None = None) -> None:
        """Write job files with the numbered names that the Go agent uses. The last job gets number 0000."""
        for number, name in enumerate(reversed(names)):
            file = self.world.job(name, start or "echo $$ >$pidfile; echo $$ >>$log; exec sleep 600")
            (self.base / f"monit/job/{number:04}_{name}.monitrc").write_text(file.text)

    def start(self, *options: str) -> None:
        argv = [sys.executable, "-m", "agent_shim.cli", "monit", "-c", str(self.control), "-b", str(self.base)]
        self.daemon = process.spawn([*argv, *options], env=dict(os.environ), stdout=self.out, stderr=self.out)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.daemon is not None
        self.daemon.send(number)
        return await self.daemon.wait() or 0

    async def call(self, target: str, body: str = "", user: str = USER) -> tuple[int, str]:
        """Return the status and body of the response to a GET request, or to a POST request if there is a body.

        The status is 0 if no daemon answers.
        """
        with contextlib.suppress(OSError, IndexError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                head = [f"{'POST' if body else 'GET'} {target} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
                head.append(f"Authorization: Basic {base64.b64encode(user.encode()).decode()}")
                writer.write("\r\n".join([*head, "", body]).encode())
                async with asyncio.timeout(20):
                    answer = (await reader.read()).decode("latin-1")
            finally:
                writer.close()
            return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]
        return 0, ""

    async def act(self, name: str, action: str, user: str = USER) -> int:
        """Request an action and return the HTTP status.

        The request is retried if its connection breaks, which can happen on a busy machine.
        """

        async def answered() -> int | None:
            return (await self.call(f"/{name}", f"action={action}", user))[0] or None

        return await until(answered)

    async def document(self) -> ET.Element | None:
        code, text = await self.call("/_status2?format=xml")
        return ET.fromstring(text.encode("latin-1")) if code == 200 else None  # noqa: S314 - written by our daemon

    async def states(self) -> dict[str, str]:
        """Return the states that the Go agent would read for the services in the ``vcap`` group
        (jobsupervisor/monit/status.go).
        """
        found = await self.document()
        if found is None:
            return {}
        group = [each.text for each in found.findall("servicegroups/servicegroup[@name='vcap']/service")]
        words = {"0": "unknown", "2": "starting"}
        return {
            name: words.get(each.findtext("monitor", ""), "running" if each.findtext("status") == "0" else "failing")
            for each in found.findall("services/service")
            if (name := each.get("name", "")) in group
        }

    async def until(self, **states: str) -> None:
        async def reached() -> dict[str, str] | None:
            assert self.daemon is None or not self.daemon.is_over, self.out.read_text()
            found = await self.states()
            return found if found == states else None

        last: dict[str, str] = await until(reached, f"{states}")
        assert last == states

    async def incarnation(self) -> int:
        async def shown() -> int | None:
            found = await self.document()
            return None if found is None else int(found.get("incarnation", ""))

        return await until(shown)

    def pid(self, name: str) -> int:
        return int(self.world.pidfile(name).read_text())

    def starts(self) -> int:
        return len(self.world.lines())

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the ``monit`` command with the arguments ``words`` against the daemon."""
        argv = [sys.executable, "-m", "agent_shim.cli.monit", "-b", str(self.base), *words]
        return subprocess.run(argv, capture_output=True, text=True, check=False)


def free_ports() -> tuple[int, int]:
    """Return two TCP ports that are not in use."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
async def vm(tmp_path: Path) -> AsyncIterator[MonitTree]:
    made = MonitTree(tmp_path / "vcap", *free_ports())
    yield made
    if made.daemon is not None:
        await made.end(signal.SIGKILL)
    made.world.end()


@contextlib.asynccontextmanager
async def mail_server(port: int) -> AsyncIterator[list[list[str]]]:
    """Run an SMTP server (RFC 5321). Yield a list to which it adds each email as a list of lines."""
    mails: list[list[str]] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 here\r\n")
        while line := (await reader.readline()).decode().strip().upper():
            if line == "DATA":
                writer.write(b"354 go on\r\n")
                mail = []
                while (text := (await reader.readline()).decode().rstrip("\r\n")) != ".":
                    mail.append(text)
                mails.append(mail)
            writer.write(b"221 bye\r\n" if line == "QUIT" else b"250 ok\r\n")
            if line == "QUIT":
                break

    async with serving(take, port=port):
        yield mails


def alert(mail: list[str]) -> dict[str, str]:
    """Return the values that the Go agent reads from an email (jobsupervisor/alert_envelope.go), keyed by name."""
    lines = [line.strip().partition(": ") for line in mail]
    wanted = ("Service", "Event", "Action", "Date", "Description", "Message-id")
    return {name: value for name, _, value in lines if name in wanted}


# --- lifecycle --------------------------------------------------------------------------------------------------------


async def test_monit_daemon_starts_and_reports_the_jobs_in_its_files(vm: MonitTree) -> None:
    vm.add("web", "worker", "db")
    vm.start()
    await vm.until(web="running", worker="running", db="running")
    found = await vm.document()
    assert found is not None
    names = [each.get("name") for each in found.findall("services/service")]
    members = [each.text for each in found.findall("servicegroups/servicegroup[@name='vcap']/service")]

    assert names[:3] == ["web", "worker", "db"]
    assert members == ["db", "worker", "web"]
    assert found.findtext("server/poll") == "1"
    assert found.findtext("server/controlfile") == str(vm.control)
    assert found.findtext("server/httpd/port") == str(vm.port)
    assert found.get("id") == (vm.base / "monit.id").read_text().strip()
    assert vm.daemon is not None
    assert (vm.base / "monit.pid").read_text() == f"{vm.daemon.pid}\n"
    assert Path(f"/proc/{vm.daemon.pid}/comm").read_text() == "monit\n"
    assert "web: appeared, now running" in (vm.base / "monit/monit.log").read_text()


async def test_monit_daemon_starts_services_in_manual_mode_only_on_request(vm: MonitTree) -> None:
    vm.add("web", "worker")
    with (vm.base / "monit/job/0000_worker.monitrc").open("a") as file:
        file.write("\n  mode manual\n")
    vm.start()
    await vm.until(web="running", worker="unknown")
    assert vm.starts() == 1

    assert await vm.act("worker", "start") == 200
    await vm.until(web="running", worker="running")
    await vm.end()
    vm.start()
    await vm.until(web="running", worker="running")
    assert vm.starts() == 2


async def test_monit_daemon_restarts_a_dead_process_and_sends_mail(vm: MonitTree) -> None:
    vm.add("web")
    async with mail_server(vm.mail) as mails:
        vm.start()
        await vm.until(web="running")
        before = vm.pid("web")
        os.kill(before, signal.SIGKILL)
        await until(lambda: vm.starts() == 2)
        await until(lambda: [each for each in map(alert, mails) if each["Service"] == "web"])

    found = next(each for each in map(alert, mails) if each["Service"] == "web")
    assert (found["Event"], found["Action"]) == ("Does not exist", "restart")
    assert "process is not running" in found["Description"]
    assert time.strptime(found["Date"][:-6], "%a, %d %b %Y %H:%M:%S")  # RFC 1123 with a numeric zone
    assert found["Message-id"].startswith("<")
    assert mails[0][:4][0] == "From: monit@localhost"
    assert alert(mails[0])["Description"] == "Monit started"


async def test_monit_daemon_keeps_queued_mail_across_a_restart(vm: MonitTree) -> None:
    vm.add("web")
    vm.start()
    await vm.until(web="running")
    os.kill(vm.pid("web"), signal.SIGKILL)
    await until((vm.base / "monit/events/agent_shim.json").exists)
    kept = vm.base / "monit/events/agent_shim.json"
    await until(lambda: len(json.loads(kept.read_text())) >= 2)
    await vm.end(signal.SIGKILL)

    async with mail_server(vm.mail) as mails:
        vm.start()
        await until(lambda: [each for each in map(alert, mails) if each["Event"] == "Does not exist"])
        await until(lambda: json.loads(kept.read_text()) == [])


async def test_monit_daemon_stops_and_starts_services_only_for_authorized_http_callers(vm: MonitTree) -> None:
    vm.control.write_text(vm.control.read_text().replace("\n\ninclude", '\n  allow look:"only" read-only\n\ninclude'))
    vm.add("web", "db")
    vm.start()
    await vm.until(web="running", db="running")
    pid = vm.pid("web")
    assert (await vm.call("/_status2?format=xml", user="vcap:wrong"))[0] == 401
    assert await vm.act("web", "stop", "vcap:wrong") == 401
    assert (await vm.call("/_status2?format=xml", user="look:only"))[0] == 200
    assert await vm.act("web", "stop", "look:only") == 403
    assert await vm.states() == {"web": "running", "db": "running"}

    assert await vm.act("web", "stop") == 200
    await vm.until(web="unknown", db="running")
    await until(lambda: not Path(f"/proc/{pid}").exists())
    assert await vm.act("web", "start") == 200
    await vm.until(web="running", db="running")
    assert await vm.act("none", "start") == 404
    assert await vm.act("web", "dance") == 400


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGHUP", "monit reload", "killed"])
async def test_monit_daemon_reload_adds_new_jobs_and_forgets_removed_ones(vm: MonitTree, how: str) -> None:
    """As under monit, a removed job's processes keep running. The Go agent waits until the incarnation has increased,
    so every reload must increase it, even if two reloads happen in the same second.
    """
    vm.add("web", "db")
    vm.start()
    await vm.until(web="running", db="running")
    kept, removed, before = vm.pid("web"), vm.pid("db"), await vm.incarnation()
    for path in (vm.base / "monit/job").iterdir():
        path.unlink()
    vm.add("web", "worker")

    if how == "monit reload":
        done = vm.command("reload")
        assert (done.returncode, done.stderr) == (0, "Reinitializing monit daemon\n")
    elif how == "SIGHUP":
        assert vm.daemon is not None
        vm.daemon.send(signal.SIGHUP)
    else:
        await vm.end(signal.SIGKILL)
        vm.start()

    await vm.until(web="running", worker="running")
    assert await vm.incarnation() > before
    assert vm.pid("web") == kept
    assert Path(f"/proc/{removed}").exists()
    assert vm.starts() == 3


async def test_monit_daemon_exits_on_an_invalid_control_file_and_names_the_line(vm: MonitTree) -> None:
    vm.control.write_text("set daemon 10\nset httpd port 2822\n  allow md5 /x\n")
    vm.start()
    assert vm.daemon is not None

    assert await vm.daemon.wait() == 78
    said = vm.out.read_text()
    assert f"cannot read {vm.control}: line 3 column 9: found 'md5', expected USER:PASSWORD" in said

    argv = [sys.executable, "-m", "agent_shim.cli.monit", "-b", str(vm.base), "-I", "-c", str(vm.control)]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
    assert (done.returncode, "line 3 column 9" in done.stderr) == (1, True)


async def test_monit_daemon_survives_invalid_job_files_and_reloads(vm: MonitTree) -> None:
    """monit would exit in this case, and then nothing would supervise the jobs."""
    vm.add("web", "db")
    (vm.base / "monit/job/0000_db.monitrc").write_text("check process db\n  with pidfile nowhere\n")
    vm.start()
    await vm.until(web="running", db="failing")
    found = await vm.document()

    assert found is not None
    texts = [each.findtext("status_message") for each in found.findall("services/service[@name='db']")]
    assert ["line 2 column 16" in (text or "") for text in texts] == [True]
    vm.control.write_text("set daemon ten\n")
    assert vm.daemon is not None
    vm.daemon.send(signal.SIGHUP)
    await until(lambda: "line 1 column 12: found 'ten'" in (vm.base / "monit/monit.log").read_text())
    await vm.until(web="running", db="failing")


# --- exits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_next_monit_daemon_adopts_running_jobs(vm: MonitTree, number: signal.Signals) -> None:
    vm.add("web", "worker", "db")
    vm.start()
    await vm.until(web="running", worker="running", db="running")
    web, worker = vm.pid("web"), vm.pid("worker")

    assert await vm.act("db", "stop") == 200
    assert monitrc.monitored(vm.base / "monit/monit.state") == {"web": 1, "worker": 1, "db": 0}
    assert (await vm.end(number) == 0) == (number is signal.SIGTERM)
    assert (vm.base / "monit.pid").exists() == (number is signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    vm.start()
    await vm.until(web="running", worker="running", db="unknown")

    assert vm.pid("web") == web
    assert vm.starts() == 4


async def test_monit_daemon_reads_and_writes_the_monit_state_file(vm: MonitTree) -> None:
    vm.add("web", "db")
    state, left = vm.base / "monit/monit.state", [(b"web", 0, 0, 0, 1, 0), (b"db", 0, 0, 0, 0, 0)]
    state.write_bytes(struct.pack("i", 2) + b"".join(monitrc.STATE.pack(*each) for each in left))
    vm.start()
    await vm.until(web="running", db="unknown")
    await vm.act("db", "start")
    await vm.act("web", "stop")
    await vm.until(web="unknown", db="running")

    await until(lambda: monitrc.monitored(vm.base / "monit/monit.state") == {"web": 0, "db": 1})


async def test_monit_daemon_keeps_no_file_open_on_the_disks(vm: MonitTree) -> None:
    """The Go agent's integration suite unmounts the disks before each test case. An open file would prevent this."""
    vm.add("web")
    vm.start()
    await vm.until(web="running")
    assert vm.daemon is not None
    data, opened = vm.base / "data", Path(f"/proc/{vm.daemon.pid}/fd")

    def held() -> str:
        found = subprocess.run(["find", opened, "-lname", f"{data}/*"], capture_output=True, text=True, check=False)
        return found.stdout + "".join(re.findall(rf"{data}/.*", Path("/proc/net/unix").read_text()))

    await until(lambda: not held(), "the output of programs is open for a moment")
    assert list((vm.base / "data/bosh").iterdir()) == []


async def test_second_monit_daemon_exits_and_monit_quit_stops_the_first(vm: MonitTree) -> None:
    vm.add("web")
    vm.start()
    await vm.until(web="running")
    second = MonitTree.__new__(MonitTree)
    second.__dict__.update(vm.__dict__, daemon=None, out=vm.base / "second")
    second.start()
    assert second.daemon is not None
    assert await second.daemon.wait() == 3

    assert vm.daemon is not None
    assert vm.command("quit").stdout == f"monit daemon with pid [{vm.daemon.pid}] killed\n"
    assert await vm.daemon.wait() == 0
    assert Path(f"/proc/{vm.pid('web')}").exists()


# --- operators --------------------------------------------------------------------------------------------------------


async def test_monit_daemon_runs_bpm_processes_with_the_bpm_option(vm: MonitTree) -> None:
    config = "processes:\n- name: web\n  executable: /bin/sleep\n  args: ['600']\n"
    made = jobs.of_bpm(Paths(vm.base), "web", config)
    (vm.base / "sys").symlink_to("data/sys")
    (vm.base / "jobs/web/config").mkdir(parents=True)
    (vm.base / "jobs/web/config/bpm.yml").write_text(config)
    (vm.base / "monit/job/0000_web.monitrc").write_text(made["monit"])

    def bpm(*words: str) -> str:
        argv = [sys.executable, "-m", "agent_shim.cli.bpm", *words]
        env = {**os.environ, "BPM_BOSH_ROOT": str(vm.base)}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()

    vm.start("--bpm")
    await vm.until(web="running")
    pid = await asyncio.to_thread(bpm, "pid", "web")
    assert (vm.base / "sys/run/bpm/web/web.pid").read_text().strip() == pid

    await asyncio.to_thread(bpm, "stop", "web")
    await vm.until(web="running")
    assert await asyncio.to_thread(bpm, "pid", "web") != pid
    await vm.act("web", "stop")

    async def is_stopped() -> bool:
        return (await asyncio.to_thread(bpm, "list")).endswith("stopped")

    has_stopped: bool = await until(is_stopped)
    assert has_stopped


async def test_monit_daemon_serves_status_summary_and_metrics(vm: MonitTree) -> None:
    vm.add("web")
    where = free_address()
    vm.start("--http", where)
    await vm.until(web="running")
    argv = [sys.executable, "-m", "agent_shim.cli", "status", "-b", str(vm.base)]
    page = (await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=True)).stdout
    summary = vm.command("summary").stdout
    reader, writer = await asyncio.open_connection(*where.split(":"))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()

    assert f" (control file {vm.control}), up " in page
    assert [line.split()[:2] for line in page.splitlines() if line.startswith("web")] == [["web", "running"]]
    assert "Process 'web'                       running" in summary
    assert 'agent_shim_process_up{process="web"} 1.0' in text
    assert "agent_shim_bus_connected" not in [line.split(" ")[0] for line in text.splitlines()]


def test_monit_daemon_does_not_import_modules_that_only_an_agent_needs() -> None:
    """The modules for the bus, actions, blobs and disks use a lot of memory, and only an agent needs them."""
    script = "import sys; import agent_shim.daemon.monit_daemon; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.startswith("agent_shim.services.")}
    foreign = ("nats", "aiohttp", "prometheus_client", "agent_shim.edges.bus", "agent_shim.actions", "agent_shim.bulk")

    assert [name for name in loaded if name.startswith(foreign)] == []
    assert ours == {"agent_shim.services.vitals", "agent_shim.services.volume_lease"}
