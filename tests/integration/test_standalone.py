"""Tests an agent without a Director, which deploys rendered jobs from a directory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.errors import ActionError, ConfigError
from agent_shim.core.paths import Paths
from agent_shim.daemon import standalone
from agent_shim.host import proc, process
from agent_shim.host.process import Process
from tests.support import jobs
from tests.support.waiting import TIMEOUT_S

pytestmark = pytest.mark.slow


@dataclass
class StandaloneTree:
    """A scratch directory with the agent's base directory, the jobs to deploy, and the agent's output."""

    scratch: Path
    agent: Process | None = None

    @property
    def paths(self) -> Paths:
        return Paths(self.scratch / "vcap")

    @property
    def rendered(self) -> Path:
        return self.scratch / "rendered"

    @property
    def log(self) -> str:
        return (self.scratch / "agent.log").read_text()

    @property
    def trace(self) -> list[str]:
        """Return the recorded script calls in order."""
        path = self.scratch / "trace"
        return path.read_text().splitlines() if path.exists() else []

    def write_files(self, name: str, files: Mapping[str, str]) -> None:
        """Write files to the subdirectory ``name`` (such as ``jobs/web``) of the directory that is deployed."""
        for path, text in files.items():
            place = self.rendered / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text.lstrip("\n"))

    def job(self, name: str) -> None:
        """Write a job that sleeps, with scripts that record their calls."""
        scripts = {
            f"bin/{script}": f"#!/bin/sh\necho {name} {script} >>{self.scratch}/trace\n"
            for script in ("pre-start", "post-start", "pre-stop", "post-stop")
        }
        drain = {"bin/drain": f"#!/bin/sh\necho {name} drain >>{self.scratch}/trace\necho 0\n"}
        self.write_files(f"jobs/{name}", {**jobs.sleeper(self.paths, name), **scripts, **drain})

    def start(self) -> None:
        config = self.scratch / "agent.json"
        config.write_text(json.dumps({"AgentShim": {"http": "off", "spec": str(self.rendered)}}))
        argv = [sys.executable, "-m", "agent_shim.cli", "run", "-C", str(config), "-b", str(self.paths.base)]
        log = self.scratch / "agent.log"
        self.agent = process.spawn(argv, env=dict(os.environ), cwd=Path.cwd(), stdout=log, stderr=log)

    async def end(self, sig: int = signal.SIGTERM) -> None:
        if self.agent is not None:
            self.agent.send(sig)
            await self.agent.wait()
            self.agent = None

    async def ask(self, *words: str) -> tuple[int | None, str]:
        """Run an ``agent-shim`` command for this agent. Return its exit code and output."""
        out = self.scratch / "command.out"
        out.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "agent_shim.cli", *words, "-b", str(self.paths.base)]
        status = await process.spawn(argv, env=dict(os.environ), cwd=Path.cwd(), stdout=out, stderr=out).wait()
        return status, out.read_text().strip()

    async def until_ready(self, wanted: tuple[int, str] = (0, "jobs are running")) -> None:
        said: Any = ""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while (said := await self.ask("probe", "ready")) != wanted:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"it is not ready: {said}\n{self.log}")

    def pid(self, job: str) -> int:
        return int((self.paths.run / job / f"{job}.pid").read_text())


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[StandaloneTree]:
    made = StandaloneTree(tmp_path)
    try:
        yield made
    finally:
        await made.ask("drain", "--timeout", "5")
        await made.end()


async def test_standalone_agent_deploys_jobs_like_a_director(place: StandaloneTree) -> None:
    place.job("web")
    place.write_files("packages/tool", {"bin/tool": "x"})
    place.write_files("packages/bpm", {"bin/bpm": "x", "bin/runc": "y"})
    place.write_files("", {"instance.json": '{"name": "front", "id": "front-0", "deployment": "shop"}'})
    place.start()
    await place.until_ready()

    assert place.trace == ["web pre-start", "web post-start"]
    assert (place.paths.jobs / "web/packages/tool/bin/tool").read_text() == "x"
    assert (place.paths.packages / "tool").resolve() == place.rendered / "packages/tool"
    assert (place.paths.instance / "name").read_text() == "front"
    assert (place.rendered / "packages/bpm/bin/bpm").read_text() == "x"
    assert "agent-shim" in (place.paths.packages / "bpm/bin/bpm").read_text()
    assert (place.paths.jobs / "web/packages/bpm/bin/runc").read_text() == "y"
    said = (await place.ask("status"))[1]
    assert "not used (no Director)" in said
    assert "firewall" not in said
    status = json.loads((await place.ask("status", "--json"))[1])
    assert (status["agent_id"], status["deployment"], status["instance"]) == ("front-0", "shop", "front/front-0")


async def test_restarted_standalone_agent_deploys_only_changed_jobs(place: StandaloneTree) -> None:
    place.job("web")
    place.start()
    await place.until_ready()
    pid = place.pid("web")
    await place.end(signal.SIGKILL)
    place.start()
    await place.until_ready()
    assert place.pid("web") == pid
    assert place.trace == ["web pre-start", "web post-start"]

    await place.end()
    shutil.rmtree(place.rendered / "jobs/web")
    place.job("db")
    place.start()
    await place.until_ready()
    left = proc.stat(pid)
    assert left is None or not left.is_alive
    assert [path.name for path in place.paths.jobs.iterdir() if path.name != "bpm"] == ["db"]
    assert place.trace[-2:] == ["db pre-start", "db post-start"]

    assert await place.ask("drain", "--timeout", "10") == (0, "all jobs stopped in order")
    assert place.trace[-3:] == ["db pre-stop", "db drain", "db post-stop"]
    status = json.loads((await place.ask("status", "--json"))[1])
    assert (status["job_state"], status["phase"]) == ("stopped", "the container ends: all jobs stopped in order")
    await place.end()
    place.start()
    await place.until_ready()
    assert Path(f"/proc/{place.pid('db')}").exists()


async def test_standalone_agent_waits_for_jobs_in_an_empty_directory(place: StandaloneTree) -> None:
    """The directory may be a volume that is filled later."""
    place.start()
    await place.until_ready((1, f"cannot deploy {place.rendered}: no job lies in {place.rendered / 'jobs'}"))
    place.job("web")

    assert await place.ask("probe", "live") == (0, "alive")
    await place.until_ready()


def test_standalone_agent_deploys_jobs_from_a_config_map(tmp_path: Path) -> None:
    """The kubelet provides the files as links, alongside links of its own."""
    kept = tmp_path / "rendered/jobs/web/..2026_01_01"
    (kept / "bin").mkdir(parents=True)
    (kept / "bin/ctl").write_text("#!/bin/sh\n")
    (kept.parent / "..data").symlink_to(kept.name)
    (kept.parent / "bin").symlink_to("..data/bin")
    found = standalone.read(tmp_path / "rendered")
    target = tmp_path / "data/jobs/web/1"
    standalone.install(Paths(tmp_path), {target: ("job", found.jobs["web"])})

    assert sorted(path.name for path in target.iterdir()) == ["bin"]
    assert not (target / "bin").is_symlink()
    assert os.access(target / "bin/ctl", os.X_OK)


def test_standalone_configuration_hash_changes_only_if_a_file_changes(tmp_path: Path) -> None:
    (tmp_path / "jobs/web").mkdir(parents=True)
    monit = tmp_path / "jobs/web/monit"
    monit.write_text("a")
    before = standalone.read(tmp_path).spec.configuration_hash

    assert standalone.read(tmp_path).spec.configuration_hash == before
    os.utime(monit, (1, 1))
    assert standalone.read(tmp_path).spec.configuration_hash != before


def test_files_and_hidden_directories_are_not_taken_for_standalone_jobs(tmp_path: Path) -> None:
    (tmp_path / "jobs/.hidden").mkdir(parents=True)
    (tmp_path / "jobs/file").write_text("x")

    with pytest.raises(ActionError, match="no job lies in"):
        standalone.read(tmp_path)


def test_standalone_instance_values_come_from_instance_json(tmp_path: Path) -> None:
    (tmp_path / "jobs/web").mkdir(parents=True)
    about = {"deployment": "shop", "name": "front", "id": "front-2", "az": "z3", "index": 2, "persistent_disk": 1024}
    (tmp_path / "instance.json").write_text(json.dumps(about))
    spec = standalone.read(tmp_path).spec

    assert {name: getattr(spec, name) for name in about} == about


def test_error_names_an_invalid_standalone_instance_file(tmp_path: Path) -> None:
    (tmp_path / "instance.json").write_text('{"index": "one"}')

    with pytest.raises(ConfigError, match=r"cannot read .*instance.json: .*index"):
        standalone.instance(tmp_path)


async def test_status_shows_a_failed_pre_start_with_its_last_line(place: StandaloneTree) -> None:
    place.job("web")
    script = place.rendered / "jobs/web/bin/pre-start"
    script.write_text("#!/bin/sh\necho no port is set >&2\nexit 3\n")
    place.start()
    await place.until_ready((1, "pre-start: 1 of 1 pre-start scripts failed. Failed Jobs: web."))
    status = json.loads((await place.ask("status", "--json"))[1])

    assert status["job_state"] == "failing"
    assert [line for line in status["warnings"] if line.endswith("web: no port is set")] == status["warnings"]
    script.write_text("#!/bin/sh\n")
    await place.until_ready()
    status = json.loads((await place.ask("status", "--json"))[1])
    assert (status["job_state"], status["warnings"]) == ("running", [])
