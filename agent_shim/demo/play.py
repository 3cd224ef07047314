"""Runs the demonstration, in which a Director deploys a small release to a new agent over a real bus with mutual TLS.

It needs neither root nor any network interface except loopback. All files are in a scratch directory, which is removed
at the end. Every step is checked and printed with its duration, and the exit code is 0 only if all checks passed. If a
check fails, the error names its step, and the directory is kept. Even after Ctrl-C, the demonstration stops every
process that it started.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from agent_shim.core.errors import ShimError
from agent_shim.core.paths import Paths
from agent_shim.demo.broker import NatsServer
from agent_shim.demo.director import Director, HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR
from agent_shim.demo.release import DemoRelease
from agent_shim.edges import control_client
from agent_shim.host import process

AGENT = "demo-agent"
NETWORK = {"type": "manual", "ip": "127.0.0.1", "prefix": "32", "netmask": "255.0.0.0", "default": ["dns", "gateway"]}
NETWORKS = {"default": NETWORK}


LIMIT_S = 120
"""Time limit in seconds for the whole demonstration."""
DRAIN_S = 20
"""Time limit in seconds for stopping the demonstration's jobs, and for stopping its agent."""

TO_TRY = """
A Director has deployed three jobs, and the agent serves them until Ctrl-C. To try in another terminal:

  cd {scratch}
  ./agent-shim status -b vcap
  ./agent-shim logs web -f -b vcap
  curl {url}                 # web, which counts its visitors in store
  kill -KILL $(cat vcap/sys/run/web/web.pid); curl --retry 5 --retry-connrefused {url}
  ./agent-shim stop web --wait -b vcap && ./agent-shim start web --wait -b vcap
  ./monit -b vcap summary                    # as release scripts see it
  ./agent-shim call get_state full -b vcap   # as a Director does
  curl {http}/metrics

Alerts to the Health Monitor follow.
"""


class DemoError(ShimError):
    """A failed check in the demonstration."""

    exit_code = 1


def main(*, keep: bool = False) -> int:
    """Run the demonstration once. Return 0, or raise the error of the check that failed.

    If ``keep`` is set, only deploy the jobs, and keep them running until Ctrl-C.
    """
    scratch = Path(tempfile.mkdtemp(prefix="agent-shim-demo-"))
    try:
        asyncio.run(_play(scratch, keep=keep))
    except Exception:
        raise  # keep the scratch directory, because it contains the log
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    return 0


async def _play(scratch: Path, *, keep: bool) -> None:
    """Start the bus, connect a Director and a Health Monitor, and run the demonstration."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _ended_by, number, me.cancel)
    async with NatsServer(scratch / "bus") as server:
        await server.add_agent(AGENT)
        monitor, director = HealthMonitor(), Director()
        async with monitor.on(server.peer(HEALTH_MONITOR)), director.on(server.peer()):
            story = Story(scratch, server, director, monitor)
            await (story.stay() if keep else story.run())


def _ended_by(number: signal.Signals, end: Callable[[], object]) -> None:
    """Handle a signal by calling ``end``."""
    if number == signal.SIGHUP:  # the terminal has been closed, so discard all further output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    end()


def _print(text: str, end: str = "\n") -> None:
    """Print text at once, unless the terminal has been closed."""
    try:
        print(text, end=end, flush=True)
    except OSError as exc:
        if exc.errno != errno.EIO:  # EIO means that the terminal was closed, and SIGHUP will follow
            raise


def _log(scratch: Path) -> Path:
    return scratch / "agent.log"


class Story:
    """The steps of the demonstration, in the order in which ``run`` executes them."""

    def __init__(self, scratch: Path, server: NatsServer, director: Director, monitor: HealthMonitor) -> None:
        self.base = scratch / "vcap"
        self.scratch = scratch
        self.server = server
        self.director = director
        self.monitor = monitor
        store, web, flaky, self.http = _free_ports(4)
        self.release = DemoRelease(self.base, {"store": store, "web": web, "flaky": flaky})
        self.begun_at = time.monotonic()
        self.steps = 0
        self._agent: process.Process | None = None
        self._has_jobs = False
        """True while jobs that ``_end`` must stop may be running."""
        self._now = "the start"
        """Name of the current step or, between steps, of the last one."""

    def say(self, what: str, *details: str) -> None:
        """Print the elapsed time and ``what``, followed by ``details`` on the next lines."""
        _print(f"{time.monotonic() - self.begun_at:7.2f} s  {what}")
        for detail in details:
            _print("".join(f"           {line}\n" for line in detail.splitlines()), end="")

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Run the block as a step, then print ``name`` and the duration. Details that the block adds to the yielded
        list are printed too.
        """
        begun_at = time.monotonic()
        details: list[str] = []
        self._now = name
        if sys.stdout.isatty():
            _print(f"{'…':>7}    {name}", end="\r")
        yield details
        self.steps += 1
        self.say(f"{name:<42} {(time.monotonic() - begun_at) * 1000:8.1f} ms", *details)

    async def run(self) -> None:
        """Run all steps, then stop the agent."""
        async with self._agent_for_the_block(), asyncio.timeout(LIMIT_S):
            await self._deploy()
            await self._kill_web()
            await self._crash()
            await self._show_observations()
            await self._errand()
            await self._stop()
        self.say(f"the agent ended with status 0: all {self.steps} steps passed")
        command = "./dev demo" if (Path(__file__).parents[2] / "dev").is_file() else "agent-shim demo"
        _print(f"\nNext: `{command} --keep` deploys the same and leaves it to you.")

    async def stay(self) -> None:
        """Deploy, print commands to try, then print the agent's alerts until a signal arrives."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with self._agent_for_the_block():
            async with asyncio.timeout(LIMIT_S):
                await self._deploy()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, _ended_by, number, ended.set)
            self._create_commands()
            words = {"scratch": shlex.quote(str(self.scratch)), "url": self.release.url}
            _print(TO_TRY.format(http=f"http://127.0.0.1:{self.http}", **words))
            alerts = asyncio.create_task(self._print_alerts())
            await ended.wait()
            alerts.cancel()
            _print("\nThe jobs, the agent and the bus end.")
        self.say("all processes have ended, and the directory is removed")

    def _create_commands(self) -> None:
        """Create the programs ``agent-shim`` and ``monit`` in the scratch directory. In an agent image, these programs
        are already installed.
        """
        for name in ("agent-shim", "monit"):
            code = f"import sys; sys.argv[0] = {name!r}; from agent_shim.cli.main import main; sys.exit(main())"
            path = self.scratch / name
            path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
            path.chmod(0o755)

    async def _print_alerts(self) -> None:
        """Print each new alert until cancelled."""
        seen = len(self.monitor.notices)
        while True:
            for notice in self.monitor.notices[seen:]:
                if notice.kind == "alert":
                    self.say(f"the Health Monitor hears: {notice.body['title']} - {notice.body['summary']}")
            seen = len(self.monitor.notices)
            await asyncio.sleep(0.2)

    @asynccontextmanager
    async def _agent_for_the_block(self) -> AsyncIterator[None]:
        """Start an agent for the duration of the block. Then stop its jobs and the agent, even if the block fails. If
        it succeeds, the agent's exit status must be 0.
        """
        try:
            await self._boot()
            yield
        except (ShimError, OSError, LookupError, ValueError) as exc:
            why = str(exc) or type(exc).__name__
            raise DemoError(f'cannot pass the step "{self._now}": {why}; the log is {_log(self.scratch)}') from exc
        finally:
            status = await self._end()
        require(status == 0, f"the agent ended with status {status}")

    async def _end(self) -> int | None:
        """Stop the jobs, which would otherwise keep running, and then the agent. Return the agent's exit status."""
        if self._agent is None:
            return 0
        if self._has_jobs:
            drain = {"command": "drain", "timeout": DRAIN_S}
            with contextlib.suppress(ShimError):
                path = Paths(self.base).control_socket
                await asyncio.to_thread(control_client.ask, path, drain, timeout=2 * DRAIN_S)
        return await self._agent.terminate(DRAIN_S)

    async def _boot(self) -> None:
        """Start the agent, and wait for its first answer and its first heartbeat."""
        self._write_settings()
        with self.step("agent started, until its first pong") as details:
            self._agent = process.spawn(
                [
                    *(sys.executable, "-m", "agent_shim.cli", "run", "-C", str(self.scratch / "agent.json")),
                    *("-b", str(self.base), "--http", f"127.0.0.1:{self.http}"),
                ],
                env=dict(os.environ),
                stdout=_log(self.scratch),
                stderr=_log(self.scratch),
            )
            ready = asyncio.ensure_future(self.director.wait_until_ready(AGENT, patience=0.05))
            ended = asyncio.ensure_future(self._agent.wait())
            await asyncio.wait({ready, ended}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not ready.done():  # the agent has exited, or does not answer; the last line of its log says why
                ready.cancel()
                raise DemoError(_log(self.scratch).read_text(errors="replace").strip().rpartition("\n")[2])
            details.append(f"pid {self._agent.pid}, user {os.geteuid()}, all files below {self.base}")
        with self.step("first heartbeat") as details:
            notice = await self.monitor.wait_for("heartbeat", AGENT)
            details.append(json.dumps(notice.body))

    def _write_settings(self) -> None:
        blobs = self.scratch / "blobs"
        blobs.mkdir()
        mbus = self.server.mbus(AGENT, bootstrap=True)
        cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}
        settings = {
            "agent_id": AGENT,
            "vm": {"name": "vm-demo"},
            "networks": NETWORKS,
            "blobstore": {"provider": "local", "options": {"blobstore_path": str(blobs)}},
            "env": {"bosh": {"mbus": {"urls": list(mbus.urls), "cert": cert}}},
        }
        source = self.scratch / "settings.json"
        source.touch(mode=0o600)
        source.write_text(json.dumps(settings))
        config = {"Infrastructure": {"Settings": {"Sources": [{"Type": "File", "SettingsPath": str(source)}]}}}
        (self.scratch / "agent.json").write_text(json.dumps(config))

    async def _run(self, method: str, *arguments: Any, title: str = "") -> Any:
        """Run an action as the Director does, and print how long the Director had to wait."""
        with self.step(title or method) as details:
            result = await self.director.run(AGENT, method, *arguments)
            details.append(f"-> {json.dumps(result)}"[:200])
        return result

    async def _deploy(self) -> None:
        """Deploy the release with the same requests as a Director, and wait until its jobs are running."""
        spec = self.release.spec(AGENT, NETWORKS)
        for blob_id, content in self.release.blobs.items():
            (self.scratch / "blobs" / blob_id).write_bytes(content)
        # As a Director does for a new VM, apply a spec without jobs first.
        await self._run("apply", {name: spec[name] for name in ("deployment", "job", "index", "id", "networks")})
        state = await self.director.value(AGENT, "get_state")
        require(state["networks"] == NETWORKS, "the returned networks differ")
        spec["rendered_templates_archive"] = await self._upload()
        await self._run("prepare", spec)
        # The agent deleted the first upload after it had prepared the jobs.
        spec["rendered_templates_archive"] = await self._upload()
        await self._run("apply", spec)
        await self._run("run_script", "pre-start", {}, title="pre-start")
        require((self.base / "data/web/prepared").exists(), "pre-start of web left no trace")
        self._has_jobs = True
        await self._run("start")
        with self.step("job state is running") as details:
            details.append(", ".join(f"{entry['name']} {entry['state']}" for entry in await self._until_running()))
        with self.step("the deployed web service answers") as details:
            details.append((await self._until_answered(self.release.url)).strip())
        await self._run("run_script", "post-start", {}, title="post-start")

    async def _upload(self) -> dict[str, str]:
        """Send the rendered templates to the agent, and return the reference to them for the spec."""
        content = self.release.templates()
        blob_id = str(uuid.uuid4())
        checksum = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        payload = base64.encodebytes(content).decode()
        await self._run("upload_blob", {"blob_id": blob_id, "checksum": checksum, "payload": payload})
        return {"blobstore_id": blob_id, "sha1": checksum}

    async def _until_running(self) -> list[dict[str, Any]]:
        """Wait until the agent reports the job state ``running``, and return the processes in its report."""
        while True:
            state = await self.director.value(AGENT, "get_state")
            if state["job_state"] == "running":
                processes: list[dict[str, Any]] = state["processes"]
                return processes
            await asyncio.sleep(0.02)

    async def _kill_web(self) -> None:
        """Kill a job's process. The agent must restart it and raise an alert."""
        pidfile = self.base / "sys/run/web/web.pid"
        before = pidfile.read_text()
        with self.step("web killed with SIGKILL, until it answers again") as details:
            os.kill(int(before), signal.SIGKILL)  # simulates a crash; the agent itself never signals a pid from a file
            while pidfile.read_text().strip() in ("", before.strip()):
                await asyncio.sleep(0.001)
            details.append((await self._until_answered(self.release.url)).strip())
        alert = await self.monitor.wait_for("alert", AGENT, lambda body: body["title"].startswith("web "))
        state = await self.director.value(AGENT, "get_state")
        require(state["job_state"] != "running", "a process that has just died counted as running")
        self.say(f"alert: {alert.body['title']}, severity {alert.body['severity']}; job state {state['job_state']}")
        with self.step("running again, after ten seconds without a failure"):
            await self._until_running()

    async def _until_answered(self, url: str) -> str:
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.to_thread(_get, url)
            await asyncio.sleep(0.001)

    async def _crash(self) -> None:
        """Make a job's server crash. The agent must restart it and raise an alert."""
        with self.step("flaky crashes by itself, until it is back"):
            with contextlib.suppress(OSError):  # the server crashes instead of answering
                await asyncio.to_thread(_get, self.release.flaky_url + "crash")
            await self.monitor.wait_for("alert", AGENT, lambda body: body["title"].startswith("flaky "))
            await self._until_answered(self.release.flaky_url)
        with self.step("running again"):
            await self._until_running()

    async def _show_observations(self) -> None:
        """Print the vitals, the output of ``agent-shim status``, and some of the metrics."""
        state = await self.director.value(AGENT, "get_state", "full")
        vitals = state["vitals"]
        self.say(
            "vitals",
            f"load {' '.join(vitals['load'])}, cpu user {vitals['cpu']['user']} % sys {vitals['cpu']['sys']} %, "
            f"memory {vitals['mem']['percent']} %, system disk {vitals['disk']['system']['percent']} %",
        )
        command = [sys.executable, "-m", "agent_shim.cli", "status", "-b", str(self.base)]
        table = self.scratch / "status.txt"
        require(await process.spawn(command, env=dict(os.environ), stdout=table, stderr=table).wait() == 0, "no status")
        self.say("agent-shim status", table.read_text())
        metrics = await asyncio.to_thread(_get, f"http://127.0.0.1:{self.http}/metrics")
        wanted = ("agent_shim_process_up", "agent_shim_process_restarts_total")
        lines = [line for line in metrics.splitlines() if line.startswith(wanted)]
        require(len(lines) >= 6, "metrics of the processes are missing")
        self.say("metrics", "\n".join(lines))

    async def _errand(self) -> None:
        result = await self._run("run_errand", "smoke")
        require(result["exit_code"] == 0, "the errand failed")
        require(result["stdout"].startswith("hello, visitor"), "the errand did not reach the web service")

    async def _stop(self) -> None:
        """Stop the jobs with the same requests as a Director, and check that their servers no longer answer."""
        # The Director tells pre-stop scripts that neither the VM, the instance nor the deployment will be deleted.
        keep = dict.fromkeys(("BOSH_VM_NEXT_STATE", "BOSH_INSTANCE_NEXT_STATE", "BOSH_DEPLOYMENT_NEXT_STATE"), "keep")
        await self._run("run_script", "pre-stop", {"env": keep}, title="pre-stop")
        require(await self._run("drain", "shutdown", {}) == 0, "drain did not end with 0")
        await self.monitor.wait_for("shutdown", AGENT)
        await self._run("stop")
        await self._run("run_script", "post-stop", {}, title="post-stop")
        state = await self.director.value(AGENT, "get_state")
        require(state["job_state"] == "stopped", f"the job state after stop is {state['job_state']}")
        for url in (self.release.url, self.release.flaky_url):
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_get, url)
                raise DemoError(f"cannot stop: a server still answers at {url}")
        self._has_jobs = False
        self.say("no process of the release runs any longer")


def require(holds: bool, otherwise: str) -> None:
    """Raise ``DemoError`` with the reason ``otherwise`` unless ``holds`` is true."""
    if not holds:
        raise DemoError(f"cannot continue: {otherwise}")


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read(), "utf-8")


def _free_ports(number: int) -> list[int]:
    """Return ``number`` ports that are currently free."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [int(opened.getsockname()[1]) for opened in sockets]
