"""Tests the ``bpm`` command, called as release scripts call it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_shim import __version__
from agent_shim.cli import bpm as bpm_cli
from agent_shim.core.paths import Paths
from agent_shim.edges import control_server
from agent_shim.host import proc, process
from agent_shim.services.bundles import install_bpm_wrapper
from agent_shim.supervisor import bpm_api
from tests.support import bpm_keys
from tests.support.programs import end_kept, is_alive
from tests.support.terminals import Terminal
from tests.support.waiting import until
from tests.support.world import LocalAgent, world

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def machine(base: Path) -> AsyncIterator[LocalAgent]:
    """Run a booted agent that answers ``bpm`` requests on its control socket."""
    async with world(base) as found:

        async def answer(request: dict[str, Any], *_: object) -> bytes:
            return msgspec.json.encode(await bpm_api.answer(found.agent.supervisor.bpm, request))

        install_bpm_wrapper(found.paths)
        async with control_server.listening(found.paths.control_socket, answer):
            try:
                yield found
            finally:
                end_kept(found.paths)


def deploy(base: Path, script: str, more: str = "") -> None:
    """Write the ``web`` job's files, as a deploy would."""
    job = base / "vcap/jobs/web"
    (job / "config").mkdir(parents=True)
    (job / "bin").mkdir()
    (job / "bin/web").write_text(f"#!/bin/sh\n{script}\n")
    (job / "bin/web").chmod(0o755)
    (job / "config/bpm.yml").write_text(f"processes: [{{name: web, executable: {job}/bin/web{more}}}]\n")


async def bpm(found: LocalAgent, line: str, **env: str) -> tuple[int, str, str]:
    """Run a ``bpm`` command line, and return its exit code, stdout and stderr."""
    running = _spawn(found, line, env=env)
    status = await running.wait()
    assert status is not None
    return status, (found.paths.base / "out").read_text(), (found.paths.base / "err").read_text()


def _spawn(
    found: LocalAgent,
    line: str,
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    env: dict[str, str] | None = None,
) -> process.Process:
    """Start a ``bpm`` command line. Its output is written to files, unless descriptors are given."""
    for name in ("out", "err"):
        (found.paths.base / name).write_text("")
    tool = str(found.paths.jobs / "bpm/bin/bpm")
    return process.spawn(
        [tool, *line.split()],
        env={"PATH": os.environ["PATH"], **(env or {})},
        stdout=found.paths.base / "out" if stdout is None else stdout,
        stderr=found.paths.base / "err" if stderr is None else stderr,
    )


async def test_bpm_command_starts_lists_and_stops_a_process(tmp_path: Path) -> None:
    async with machine(tmp_path) as found:
        deploy(tmp_path, "exec sleep 600")
        assert await bpm(found, "list") == (0, "Name Pid Status\nweb  -   stopped\n", "")
        assert await bpm(found, "pid web") == (1, "", "Error: process is not running or could not be found\n")
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


@pytest.mark.parametrize("line", ["version", "--version", "--version=true", "--version=false --version=T"])
async def test_bpm_command_prints_its_version(tmp_path: Path, line: str) -> None:
    async with machine(tmp_path) as found:
        assert await bpm(found, line) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("start nothing", "failed to parse job configuration: cannot read {jobs}/nothing/config/bpm.yml: "),
        ("run web -p other", 'process "other" not present in job configuration ({jobs}/web/config/bpm.yml)'),
        ("pid web -p other", "process is not running or could not be found"),
        ("shell web", "process is not running or could not be found"),
        ("trace web", "process is not running or could not be found"),
        ("start ../web", "failed to get job: '../web'"),
        ("run web -v /x:odd", "invalid volume option: odd"),
        ("run web -e NAME", 'invalid environment variable definition (format should be KEY=value): "NAME"'),
        ("run web -e -e", 'invalid environment variable definition (format should be KEY=value): "-e"'),
        ("logs web", "logs not found"),
        ("logs web --help --help=false --follow=F", "logs not found"),
        ("logs ../web", "logs not found"),
        ("frobnicate", 'unknown command "frobnicate" for "bpm"'),
    ],
)
async def test_bpm_command_errors_go_to_stderr_with_exit_code_1(tmp_path: Path, line: str, error: str) -> None:
    async with machine(tmp_path) as found:
        deploy(tmp_path, "exec sleep 600")
        status, out, err = await bpm(found, line.format(base=found.paths.base))

        assert (status, out) == (1, "")
        assert err.startswith(f"Error: {error.format(base=found.paths.base, jobs=found.paths.jobs)}")


@pytest.mark.parametrize(
    ("line", "usage", "error"),
    [
        ("", "bpm [command]", "Exit code 1"),
        ("start", "bpm start <job-name> [flags]", "must specify a job"),
        ("start -x web", "bpm start <job-name> [flags]", "unknown shorthand flag: 'x' in -x"),
        ("start --odd web", "bpm start <job-name> [flags]", "unknown flag: --odd"),
        ("start web -p", "bpm start <job-name> [flags]", "flag needs an argument: 'p' in -p"),
        ("logs web -q=maybe", "bpm logs <job-name> [flags]", 'invalid argument "maybe" for "-q, --quiet" flag'),
        ("logs web -n x", "bpm logs <job-name> [flags]", 'invalid argument "x" for "-n, --lines" flag'),
    ],
)
async def test_bpm_command_shows_usage_and_error_for_invalid_arguments(
    tmp_path: Path, line: str, usage: str, error: str
) -> None:
    async with machine(tmp_path) as found:
        status, out, err = await bpm(found, line)

        assert (status, out) == (1, "")
        assert err.startswith("Usage:\n")
        assert f"  {usage}\n" in err
        assert err.endswith(f"Error: {error}\n")


@pytest.mark.parametrize("line", ["help", "--help", "-h", "help start", "start --help", "start -h=1 web"])
async def test_bpm_command_help_lists_commands_or_flags(tmp_path: Path, line: str) -> None:
    async with machine(tmp_path) as found:
        status, out, err = await bpm(found, line)

        assert (status, err) == (0, "")
        wanted = ["bpm start <job-name>", "--process string"] if "start" in line else ["Available Commands:", "  stop "]
        assert all(each in out for each in wanted)


async def test_bpm_command_stop_succeeds_for_an_unknown_process(tmp_path: Path) -> None:
    """Drain scripts and monit run ``bpm stop`` even for processes that are neither configured nor running."""
    async with machine(tmp_path) as found:
        deploy(tmp_path, "exec sleep 600")
        for line in ("stop web", "stop web -p other", "stop nothing"):
            assert await bpm(found, line) == (0, "", ""), line
        assert not (found.paths.sys / "log/nothing").exists()


@pytest.mark.parametrize("spelling", ["-p worker web", "web -pworker", "web -p=worker", "web --process worker"])
async def test_bpm_command_accepts_every_spelling_of_the_process_flag(tmp_path: Path, spelling: str) -> None:
    async with machine(tmp_path) as found:
        deploy(tmp_path, "exec sleep 600")
        config = tmp_path / "vcap/jobs/web/config/bpm.yml"
        config.write_text(config.read_text().replace("name: web", "name: worker"))
        assert await bpm(found, f"start {spelling}") == (0, "", "")
        assert (await bpm(found, f"pid {spelling}"))[0] == 0


async def test_bpm_command_without_an_agent_fails(tmp_path: Path) -> None:
    async with machine(tmp_path) as found:
        pass
    status, _, err = await bpm(found, "start web")

    assert status == 1
    assert err.startswith("Error: cannot ask the agent at " if os.geteuid() == 0 else "Error: bpm must be run as root")


async def test_bpm_command_list_reports_invalid_configurations(tmp_path: Path) -> None:
    async with machine(tmp_path) as found:
        deploy(tmp_path, "exec sleep 600")
        other = tmp_path / "vcap/jobs/bad/config"
        other.mkdir(parents=True)
        (other / "bpm.yml").write_text("processes: 1\n")
        status, out, err = await bpm(found, "list")

        assert (status, out) == (0, "Name Pid Status\nweb  -   stopped\n")
        assert err.startswith("invalid config for bad: ")


async def test_bpm_command_run_shows_output_and_returns_the_exit_code(tmp_path: Path) -> None:
    async with machine(tmp_path) as found:
        deploy(tmp_path, "echo out $NAME; echo err >&2; exit 7")
        failed = "Error: failed to run job-process: exit status 7 (exit status 7)\n"
        assert await bpm(found, "run web -e NAME=value") == (7, "out value\n", f"err\n{failed}")
        assert (found.paths.sys / "log/web/web.stdout.log").read_text() == "out value\n"
        assert (await bpm(found, "run web -e NAME=again"))[1] == "out again\n"
        assert await bpm(found, "logs web -n 1") == (0, "out again\n", "")
        assert await bpm(found, "logs web -e") == (0, "err\nerr\n", "")
        assert not (found.paths.sys / "run/bpm/web/web.pid").exists()


@pytest.mark.attack("text from a job sends control sequences to an operator's terminal")
@pytest.mark.parametrize("terminals", [("stdout", "stderr"), ("stderr",), ("stdout",)], ids="+".join)
async def test_bpm_command_run_escapes_output_for_a_terminal(tmp_path: Path, terminals: tuple[str, ...]) -> None:
    async with machine(tmp_path) as found:
        orders = r"printf '\033]0;owned\007\n'"
        deploy(tmp_path, f"{orders}; {orders} >&2")
        with Terminal() as terminal:
            running = _spawn(
                found,
                "run web",
                stdout=terminal.theirs if "stdout" in terminals else None,
                stderr=terminal.theirs if "stderr" in terminals else None,
            )
            async with asyncio.timeout(30):
                assert await running.wait() == 0
            shown = terminal.read()

        assert shown.count(rb"\u001b]0;owned\u0007" + b"\r\n") == len(terminals)
        assert b"\x1b" not in shown
        for stream, name in (("stdout", "out"), ("stderr", "err")):
            if stream not in terminals:
                assert (found.paths.base / name).read_bytes() == b"\x1b]0;owned\x07\n"


@pytest.mark.attack("text from a job sends control sequences to an operator's terminal")
async def test_bpm_command_list_escapes_output_and_errors_for_a_terminal(tmp_path: Path) -> None:
    """Names and values in a bpm.yml come from a release and may contain control characters, which must not reach a
    terminal.
    """
    async with machine(tmp_path) as found:
        deploy(tmp_path, "true")
        named = r'processes: [{name: "x\e]0;owned", executable: /x}]'
        for job, config in (("listed", named), ("bad", r'"\e]0;owned"')):
            place = tmp_path / f"vcap/jobs/{job}/config/bpm.yml"
            place.parent.mkdir(parents=True)
            place.write_text(f"{config}\n")
        with Terminal() as terminal:
            listing = _spawn(found, "list", stdout=terminal.theirs, stderr=terminal.theirs)
            async with asyncio.timeout(30):
                assert await listing.wait() == 0
            shown = terminal.read()

        assert b"stopped" in shown
        assert b"invalid config for bad" in shown
        assert b"\x1b" not in shown


async def test_bpm_command_trace_covers_the_process_and_its_descendants(tmp_path: Path) -> None:
    async with machine(tmp_path) as found:
        deploy(tmp_path, "sleep 600 & exec sleep 600")
        assert (await bpm(found, "start web"))[0] == 0
        top = int((await bpm(found, "pid web"))[1])
        # Wait until all three processes are running: the init process, the script and its child.
        await until(lambda: len(proc.descent(proc.children(proc.table()), [top])) == 3)
        below = sorted(proc.descent(proc.children(proc.table()), [top]) - {top})
        strace = tmp_path / "strace"
        strace.write_text('#!/bin/sh\necho "$@"\nexit ${CODE:-0}\n')
        strace.chmod(0o755)
        words = " ".join(f"-p {pid}" for pid in (top, *below))

        assert await bpm(found, "trace web", PATH=f"{tmp_path}:/usr/bin:/bin") == (0, f"-s 100 -f -y -yy {words}\n", "")
        assert (await bpm(found, "trace web", PATH=f"{tmp_path}:/usr/bin:/bin", CODE="1"))[0] == 1
        missing = "Error: cannot run strace: No such file or directory\n"
        assert await bpm(found, "trace web", PATH="/nowhere") == (1, "", missing)


async def test_bpm_command_run_kills_its_process_when_signalled(tmp_path: Path) -> None:
    """A cancelled errand that uses ``bpm run`` must not leave a process behind."""
    async with machine(tmp_path) as found:
        deploy(tmp_path, "echo up; exec sleep 600")
        running = _spawn(found, "run web")
        out = found.paths.base / "out"
        await until(lambda: out.read_text().strip())
        (kept,) = found.agent.supervisor.keepers.of(["bpm/web/web"])
        started = [each.pid for each in kept.processes()]
        assert started
        running.send(15)
        async with asyncio.timeout(10):
            assert await running.wait() == 143
        assert not any(is_alive(pid) for pid in started)


def test_documented_bpm_keys_match_the_code() -> None:
    root = Path(__file__).resolve().parents[2]

    assert bpm_keys.table() in (root / "docs/bpm.md").read_text()


def test_bpm_command_uses_the_agents_control_socket() -> None:
    assert Paths().base / bpm_cli.SOCKET == Paths().control_socket
