"""The command ``bpm`` as release scripts call it, and jobs deployed that use it, with a release of bpm and without."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_shim import __version__, control
from agent_shim.bundles import put_bpm_in_front
from agent_shim.host import proc, process
from agent_shim.supervisor import bpm_answers, bpm_run
from tests.support import jobs
from tests.support.programs import end_marked, eventually, is_alive
from tests.support.world import World, world

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def machine(base: Path) -> AsyncIterator[World]:
    """A booted agent that answers on its socket."""
    async with world(base) as found:

        async def answer(request: dict[str, Any], _: bytes) -> bytes:
            return msgspec.json.encode(await bpm_answers.answer(found.agent.supervisor.bpm, request))

        put_bpm_in_front(found.paths)
        async with control.listening(found.paths.control_socket, answer):
            try:
                yield found
            finally:
                end_marked("AGENT_SHIM_SERVICE", f"@{found.paths.base}")


def deploy(base: Path, script: str, more: str = "") -> None:
    """A job in place without the Director."""
    job = base / "vcap/jobs/web"
    (job / "config").mkdir(parents=True)
    (job / "bin").mkdir()
    (job / "bin/web").write_text(f"#!/bin/sh\n{script}\n")
    (job / "bin/web").chmod(0o755)
    (job / "config/bpm.yml").write_text(f"processes: [{{name: web, executable: {job}/bin/web{more}}}]\n")


async def bpm(found: World, line: str) -> tuple[int, str, str]:
    """Exit code and output of a call."""
    running = _spawn(found, line)
    status = await running.wait()
    assert status is not None
    return status, (found.paths.base / "out").read_text(), (found.paths.base / "err").read_text()


def _spawn(found: World, line: str) -> process.Process:
    for name in ("out", "err"):
        (found.paths.base / name).write_text("")
    tool = str(found.paths.jobs / "bpm/bin/bpm")
    return process.spawn(
        [tool, *line.split()],
        env={"PATH": os.environ["PATH"]},
        stdout=found.paths.base / "out",
        stderr=found.paths.base / "err",
    )


async def test_start_pid_list_stop(tmp_path: Path) -> None:
    """The life of a process, started once, however often it is asked for."""
    async with machine(tmp_path) as found:
        deploy(tmp_path, "exec sleep 600")
        assert await bpm(found, "list") == (0, "Name Pid Status\nweb  -   stopped\n", "")
        assert await bpm(found, "pid web") == (1, "", "Error: job is not running\n")
        assert await bpm(found, "start web") == (0, "", "")
        assert await bpm(found, "start -p web web") == (0, "", "")
        status, out, _ = await bpm(found, "pid web")
        pid = int(out)
        assert (status, is_alive(pid)) == (0, True)
        assert (found.paths.sys / "run/bpm/web/web.pid").read_text() == str(pid)
        status, out, _ = await bpm(found, "list")
        assert out.splitlines()[1].split() == ["web", str(pid), "running"]
        assert await bpm(found, "stop web") == (0, "", "")
        assert not is_alive(pid)
        assert await bpm(found, "stop web") == (0, "", "")


@pytest.mark.parametrize("line", ["version", "--version"])
async def test_version(tmp_path: Path, line: str) -> None:
    """A line on stdout."""
    async with machine(tmp_path) as found:
        assert await bpm(found, line) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("start nothing", "Error: failed to start job-process: cannot read "),
        ("stop nothing", "Error: failed to get job"),
        ("pid web -p other", "Error: failed to get job: process 'other' is not in the configuration of job web"),
        ("start", "Error: must specify a job"),
        ("start ../web", "Error: failed to get job: '../web'"),
        ("run web -v /x:odd", "Error: failed to run job-process: invalid volume options: odd"),
        ("logs web", "Error: logs not found"),
        ("shell web", "Error: job is not running"),
        ("frobnicate", "Error: "),
    ],
)
async def test_errors(tmp_path: Path, line: str, error: str) -> None:
    """On stderr, with exit code 1."""
    async with machine(tmp_path) as found:
        deploy(tmp_path, "exec sleep 600")
        status, out, err = await bpm(found, line)

        assert (status, out) == (1, "")
        assert error in err


async def test_without_an_agent_nothing_is_done(tmp_path: Path) -> None:
    """And that is said; who is not root is told that first, as by bpm."""
    async with machine(tmp_path) as found:
        pass
    status, _, err = await bpm(found, "start web")

    assert status == 1
    assert err.startswith("Error: cannot ask the agent at " if os.geteuid() == 0 else "Error: bpm must be run as root")


async def test_list_tells_of_bad_configurations(tmp_path: Path) -> None:
    """On stderr; the others are listed."""
    async with machine(tmp_path) as found:
        deploy(tmp_path, "exec sleep 600")
        other = tmp_path / "vcap/jobs/bad/config"
        other.mkdir(parents=True)
        (other / "bpm.yml").write_text("processes: 1\n")
        status, out, err = await bpm(found, "list")

        assert (status, out) == (0, "Name Pid Status\nweb  -   stopped\n")
        assert err.startswith("invalid config for bad: ")


async def test_run_shows_output_and_ends_as_the_process_does(tmp_path: Path) -> None:
    """Both streams, in the logs as well; no pid file; variables from the command line."""
    async with machine(tmp_path) as found:
        deploy(tmp_path, "echo out $NAME; echo err >&2; exit 7")
        assert await bpm(found, "run web -e NAME=value") == (7, "out value\n", "err\n")
        assert (found.paths.sys / "log/web/web.stdout.log").read_text() == "out value\n"
        assert (await bpm(found, "run web -e NAME=again"))[1] == "out again\n"
        assert await bpm(found, "logs web -n 1") == (0, "out again\n", "")
        assert await bpm(found, "logs web -e") == (0, "err\nerr\n", "")
        assert not (found.paths.sys / "run/bpm/web/web.pid").exists()


async def test_signal_to_run_ends_the_process(tmp_path: Path) -> None:
    """An errand that is cancelled leaves nothing."""
    async with machine(tmp_path) as found:
        deploy(tmp_path, "echo up; exec sleep 600")
        running = _spawn(found, "run web")
        out = found.paths.base / "out"
        await eventually(lambda: out.read_text().strip())
        started = proc.census("AGENT_SHIM_SERVICE").marked[f"bpm/web/web@{found.paths.base}"]
        assert started
        running.send(15)
        async with asyncio.timeout(10):
            assert await running.wait() == 143
        assert not any(is_alive(pid) for pid in started)


RELEASE = """#!/bin/sh
echo the release\'s own bpm >&2
exit 99
"""


@pytest.mark.parametrize("has_release", [False, True])
async def test_release_whose_scripts_call_bpm(tmp_path: Path, has_release: bool) -> None:
    """Deployed, drained, stopped, deployed again: pre-start starts, drain asks for the pid, post-start reads the list.

    A release of bpm on the same instance brings its own command, which is not the one that is met.
    """
    async with machine(tmp_path) as found:
        paths = found.paths
        tool = paths.jobs / "bpm/bin/bpm"
        said = tmp_path / "said"
        for version in ("1", "2"):
            config = f"processes:\n- name: web\n  executable: {paths.jobs}/web/bin/web\n"
            web = {
                "monit": f"""check process web
  with pidfile {paths.sys}/run/bpm/web/web.pid
  start program "{tool} start web"
  stop program "{tool} stop web"
  group vcap
""",
                "config/bpm.yml": config,
                "bin/web": "#!/bin/sh\nexec sleep 600\n",
                "bin/pre-start": f"#!/bin/sh\n{tool} start web && {tool} pid web >{said}.pre\n",
                "bin/post-start": f"#!/bin/sh\n{tool} list | awk '/^web .*running/ {{print $2}}' >{said}.post\n",
                "bin/drain": f"#!/bin/sh\n{tool} pid web >{said}.drain\necho 0\n",
            }
            wanted: dict[str, dict[str, str | bytes]] = {"web": dict(web)}
            if has_release:
                wanted["bpm"] = {"monit": "", "bin/bpm": RELEASE}
            packages = {"bpm": {"bin/bpm": RELEASE}} if has_release else {}
            spec = jobs.spec(tmp_path / "blobstore", wanted, packages, version=version)
            await found.value("prepare", spec)
            await found.value("apply", spec)
            await found.value("run_script", "pre-start", {})
            await found.value("start")
            await eventually(lambda: found.agent.supervisor.job_state() == "running")
            await found.value("run_script", "post-start", {})
            await found.value("drain", "shutdown")
            pids = {Path(f"{said}.{name}").read_text().strip() for name in ("pre", "post", "drain")}
            assert len(pids) == 1
            pid = int(pids.pop())
            stat = proc.stat(pid)
            assert stat is not None
            assert stat.is_alive
            await found.value("stop")
            assert not is_alive(pid)
            assert not (paths.sys / "run/bpm/web/web.pid").exists()


def test_levels_of_the_table_are_those_that_are_used() -> None:
    """Each key says for every level what becomes of it, and the document has just that."""
    root = Path(__file__).resolve().parents[2]

    assert bpm_run.key_table() in (root / "docs/bpm.md").read_text()
