"""Tests job scripts as real processes in a scratch tree."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.core.spec import ApplySpec
from agent_shim.services import scripts
from agent_shim.services.scripts import Errand, Scripts
from agent_shim.supervisor.ctl_programs import Programs
from tests.support.programs import end_kept, end_marked, is_alive, number_in
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("keepers_are_closed")


DISK = ApplySpec(persistent_disk=1024)
NEXT = ApplySpec(persistent_disk=2048)
UPDATE = ["job_changed", "hash_changed", "ruby"]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path)
    for directory in (paths.bosh, paths.tmp, paths.log):
        directory.mkdir(parents=True)
    return paths


@pytest.fixture
def runner(paths: Paths) -> Iterator[Scripts]:
    """Provide a script runner. Processes that scripts leave behind are killed after the test."""
    yield patient(paths, 5)
    end_kept(paths)
    end_marked("TEST_OF", str(paths.base))


@pytest.fixture
def impatient(runner: Scripts, paths: Paths) -> Scripts:
    """Provide a script runner with a short grace period, for scripts that ignore SIGTERM."""
    return patient(paths, 0.1)


def patient(paths: Paths, grace: float) -> Scripts:
    spawn = Programs(paths).spawn_script
    return Scripts(paths, {"TEST_OF": str(paths.base), "PATH": "/nowhere", "KEPT": "yes"}, spawn, grace=grace)


def script(paths: Paths, job: str, name: str, text: str, *, mode: int = 0o755) -> Path:
    """Write a shell script for a job and return its path."""
    path = paths.jobs / job / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return path


def log(paths: Paths, job: str, name: str) -> str:
    return (paths.log / job / name).read_text()


async def test_script_output_is_appended_to_the_job_logs(paths: Paths, runner: Scripts) -> None:
    script(paths, "web", "pre-start", "echo out; echo err >&2")

    await runner.run_all("pre-start", ["absent"], {})
    await runner.run_all("pre-start", ["web", "absent"], {})
    assert stat.S_IMODE((paths.log / "web").stat().st_mode) == 0o750
    (paths.log / "web").chmod(0o770)  # a job may change the mode, which must then be kept
    await runner.run_all("pre-start", ["web", "absent"], {})

    assert log(paths, "web", "pre-start.stdout.log") == "out\nout\n"
    assert log(paths, "web", "pre-start.stderr.log") == "err\nerr\n"
    assert stat.S_IMODE((paths.log / "web").stat().st_mode) == 0o770
    assert stat.S_IMODE((paths.log / "web/pre-start.stdout.log").stat().st_mode) == 0o640
    assert not (paths.log / "absent").exists()


async def test_script_runs_with_its_environment_working_directory_and_niceness(paths: Paths, runner: Scripts) -> None:
    script(paths, "web", "pre-start", 'echo "$PATH $KEPT $EXTRA $# $(pwd) $(nice)"; cat')

    await runner.run_all("pre-start", ["web"], {"EXTRA": "more"})
    await runner.run_all("pre-start", ["web"], {"PATH": "/bin:/usr/bin", "KEPT": "no"})

    nice = os.nice(0) + 5
    expected = f"{scripts.PATH} yes more 0 / {nice}\n/bin:/usr/bin no  0 / {nice}\n"
    assert log(paths, "web", "pre-start.stdout.log") == expected


async def test_scripts_run_in_parallel_and_failures_are_listed(paths: Paths, runner: Scripts) -> None:
    """Three of the scripts wait until another one has finished, so all of them must run in parallel."""
    wait = 'while [ ! -e "{}" ]; do sleep 0.01; done; sleep 0.2; touch {}; exit {}'
    done = [paths.tmp / name for name in "abcd"]
    script(paths, "a", "post-start", wait.format(done[1], done[0], 1))
    script(paths, "b", "post-start", wait.format(done[2], done[1], 0))
    script(paths, "c", "post-start", wait.format(done[3], done[2], 3))
    script(paths, "d", "post-start", wait.format("/", done[3], 0))

    with pytest.raises(ActionError) as failed:
        await runner.run_all("post-start", ["a", "b", "none", "c", "d"], {})

    assert str(failed.value) == "2 of 4 post-start scripts failed. Failed Jobs: c, a. Successful Jobs: d, b."


async def test_script_error_contains_the_last_line_of_each_failed_script(paths: Paths, runner: Scripts) -> None:
    script(paths, "dns", "pre-start", "echo first >&2; printf 'ip: \\033[1mnot permitted\\n\\n' >&2; exit 2")
    with pytest.raises(ActionError) as failed:
        await runner.run_all("pre-start", ["dns"], {})
    assert str(failed.value) == ("1 of 1 pre-start scripts failed. Failed Jobs: dns. dns: ip: \\u001b[1mnot permitted")

    script(paths, "dns", "pre-start", "exit 2")
    script(paths, "web", "pre-start", "printf %02000d 7 >&2; exit 2")
    with pytest.raises(ActionError) as failed:
        await runner.run_all("pre-start", ["dns", "web"], {})
    assert str(failed.value).endswith(f". web: {'0' * 300}")
    assert "not permitted" not in str(failed.value)


async def test_error_for_a_traced_script_quotes_the_log_that_the_script_wrote(paths: Paths, runner: Scripts) -> None:
    """The bosh-dns pre-start uses ``set -x`` and writes its errors to a separate log, so its stderr contains only
    the trace.
    """
    own = paths.log / "dns/dns_setup.log"
    own.parent.mkdir(parents=True, exist_ok=True)
    script(paths, "dns", "pre-start", f"set -x; echo cannot bind >>{own}; exit 2")
    with pytest.raises(ActionError) as failed:
        await runner.run_all("pre-start", ["dns"], {})

    assert str(failed.value).endswith(" dns: dns_setup.log: cannot bind")


async def test_post_start_error_quotes_script_output_and_not_process_logs(paths: Paths, runner: Scripts) -> None:
    """The job's processes may be writing to its other logs at the same time. The nats-tls post-start writes its
    errors to stdout.
    """
    log = paths.log / "nats-tls"
    log.mkdir(parents=True, exist_ok=True)
    logs = f"echo started >>{log}/bpm.log; echo listening >>{log}/a.log"
    script(paths, "nats-tls", "post-start", f"{logs}; echo refused; exit 1")
    with pytest.raises(ActionError) as failed:
        await runner.run_all("post-start", ["nats-tls"], {})
    assert str(failed.value).endswith(" nats-tls: post-start.stdout.log: refused")

    script(paths, "nats-tls", "post-start", f"echo started >>{log}/bpm.log; exit 1")
    with pytest.raises(ActionError) as failed:
        await runner.run_all("post-start", ["nats-tls"], {})
    assert str(failed.value).endswith(" Failed Jobs: nats-tls.")


async def test_script_succeeds_even_if_its_background_processes_still_run(paths: Paths, runner: Scripts) -> None:
    """A child process that still holds the script's output open is neither waited for nor killed."""
    left = paths.tmp / "left"
    script(paths, "web", "pre-start", f"sleep 600 & echo $! >{left}")

    async with asyncio.timeout(60):
        await runner.run_all("pre-start", ["web"], {})

    child = number_in(left)
    assert child is not None
    assert is_alive(child)


@pytest.mark.slow
async def test_cancelled_scripts_are_terminated(paths: Paths, impatient: Scripts) -> None:
    started = paths.tmp / "started"
    script(paths, "web", "pre-start", f"trap '' TERM; sleep 600 & echo $! >{started}; wait; wait")
    running = asyncio.create_task(impatient.run_all("pre-start", ["web"], {}))
    child = await until(lambda: number_in(started))
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running

    assert not is_alive(child)


@pytest.mark.attack("a job tricks root into writing a script's output through a symlink or a hard link")
async def test_script_log_that_is_a_link_is_not_followed(paths: Paths, runner: Scripts) -> None:
    """If root followed the link, a user who may write to the log directory could make root write to any file."""
    script(paths, "web", "pre-start", "echo out")
    victim = paths.base / "victim"
    victim.write_text("safe")
    (paths.log / "web").mkdir()
    (paths.log / "web/pre-start.stdout.log").symlink_to(victim)

    with pytest.raises(ActionError, match="1 of 1 pre-start scripts failed"):
        await runner.run_all("pre-start", ["web"], {})

    assert victim.read_text() == "safe"


# --- drain ------------------------------------------------------------------------------------------------------------


async def drain(runner: Scripts, *jobs: str, cancelled: asyncio.Event | None = None) -> None:
    async with asyncio.timeout(10):
        await runner.drain(jobs, UPDATE, DISK, NEXT, cancelled or asyncio.Event())


async def test_static_drain_waits_as_long_as_the_script_says(paths: Paths, runner: Scripts) -> None:
    script(paths, "web", "drain", "echo 1")
    begun = time.monotonic()

    await drain(runner, "web")

    assert time.monotonic() - begun >= 1
    assert list(paths.tmp.iterdir()) == [], "its answer is read from a file without a name"


@pytest.mark.parametrize("printed", ["", "soon", "1 2", "1.5", "1_0", "٣", "9" * 30, "0x1", "$(seq 5000)"])
async def test_drain_script_that_prints_no_number_fails(paths: Paths, runner: Scripts, printed: str) -> None:
    script(paths, "a", "drain", f'printf %s "{printed}"')
    script(paths, "b", "drain", "sleep 0.1; echo 0")

    with pytest.raises(ActionError) as failed:
        await drain(runner, "a", "b")

    assert str(failed.value) == "1 of 2 drain scripts failed. Failed Jobs: a. Successful Jobs: b."


# --- errands ----------------------------------------------------------------------------------------------------------


async def errand(runner: Scripts, job: str = "smoke", cancelled: asyncio.Event | None = None) -> Errand:
    async with asyncio.timeout(20):
        return await runner.errand(job, cancelled or asyncio.Event())


async def test_errand_returns_its_output_and_exit_code(paths: Paths, runner: Scripts) -> None:
    script(paths, "smoke", "run", 'echo "out $# $PATH $KEPT $(pwd) $(nice)"; echo err >&2; exit 3')

    assert await errand(runner) == Errand(f"out 0 {scripts.PATH} yes / {os.nice(0)}\n", "err\n", 3)
    assert list(paths.tmp.iterdir()) == []
    script(paths, "smoke", "run", "kill -KILL $$")
    assert (await errand(runner)).exit_code == 137


async def test_cancelled_errand_that_ignores_sigterm_is_killed(paths: Paths, impatient: Scripts) -> None:
    started = paths.tmp / "started"
    script(paths, "smoke", "run", f"trap '' TERM; echo $$ >{started}; sleep 600")
    cancelled = asyncio.Event()
    running = asyncio.create_task(errand(impatient, cancelled=cancelled))
    await until(lambda: number_in(started))
    cancelled.set()

    assert await running == Errand("", "", 137)


async def test_long_errand_output_is_truncated_in_the_reply_and_kept_on_disk(paths: Paths, runner: Scripts) -> None:
    script(paths, "smoke", "run", "head -c 3000000 /dev/zero; echo end; head -c 600000 /dev/zero | tr '\\0' e >&2")

    ended = await errand(runner)

    kept = paths.tmp / "errand-smoke.stdout"
    assert ended.stdout.endswith("end\n")
    assert str(kept) in ended.stdout
    assert kept.stat().st_size == 3000004
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    encoded_bytes = sum(len(msgspec.json.encode(text)) for text in (ended.stdout, ended.stderr))
    assert scripts.MAX_OUTPUT_BYTES * 0.9 < encoded_bytes <= scripts.MAX_OUTPUT_BYTES

    script(paths, "smoke", "run", "echo short")
    assert await errand(runner) == Errand("short\n", "", 0)
    assert list(paths.tmp.iterdir()) == []


async def test_errand_output_is_not_written_through_a_link(paths: Paths, runner: Scripts) -> None:
    script(paths, "smoke", "run", "echo out")
    victim = paths.base / "victim"
    victim.write_text("safe")
    (paths.tmp / "errand-smoke.stdout").symlink_to(victim)

    assert (await errand(runner)).stdout == "out\n"
    assert victim.read_text() == "safe"


async def test_errand_is_killed_when_the_agent_exits(paths: Paths, runner: Scripts) -> None:
    started = paths.tmp / "started"
    script(paths, "smoke", "run", f"echo $$ >{started}; sleep 600")
    running = asyncio.create_task(errand(runner))
    pid = await until(lambda: number_in(started))
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running

    assert not is_alive(pid)
    assert list(paths.tmp.iterdir()) == [started]
