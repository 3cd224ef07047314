"""Tests services' start and stop programs, and the program output that the agent stores."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_shim.core.errors import HostError
from agent_shim.core.paths import Paths
from agent_shim.supervisor.ctl_programs import MAX_LAST_BYTES, MAX_OUTPUT_BYTES, Programs, end_of_last_line
from agent_shim.supervisor.monit.ast import MonitProgram
from tests.support.programs import end_kept

pytestmark = pytest.mark.usefixtures("keepers_are_closed")


@pytest.fixture(autouse=True)
def _end(tmp_path: Path) -> Iterator[None]:
    """Kill processes that the programs left behind."""
    yield
    end_kept(Paths(tmp_path))


def output_of_web(base: Path) -> tuple[Path, Programs]:
    """Return the path of the ``web`` service's output file, and the ``Programs`` object that writes to this file."""
    output = Paths(base).shim_run / "output"
    output.mkdir(parents=True)
    return output / "web.log", Programs(Paths(base))


async def test_start_program_output_is_kept_and_its_last_line_is_reported(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    output, programs = paths.shim_run / "output", Programs(paths)
    for script in ("echo one", "echo two >&2; echo"):
        program = await programs.spawn("a/b", MonitProgram(("/bin/sh", "-c", script)), "Started")
        await program.wait()

    assert (output / "a_b.log").read_text() == "one\ntwo\n\n"
    assert output.stat().st_mode & 0o777 == 0o700
    assert (output / "a_b.log").stat().st_mode & 0o7777 == 0o640
    assert str(output / "a_b.log") not in [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    stopper = await programs.spawn("a/b", MonitProgram(("/bin/sh", "-c", "echo stopping >&2")), "Stopped")
    await stopper.wait()
    assert end_of_last_line(await programs.printed("a/b")) == "two"
    assert end_of_last_line(await programs.printed("other")) == ""


async def test_programs_run_and_their_errors_are_reported_without_an_output_directory(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    paths.shim_run.mkdir(parents=True)
    (paths.shim_run / "output").write_text("no directory")
    programs = Programs(Paths(tmp_path))
    program = await programs.spawn("web", MonitProgram(("/bin/sh", "-c", "echo one")), "Started")
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)

    assert await program.wait() == 0
    with pytest.raises(HostError, match="cannot run /no/such"):
        await programs.spawn("web", MonitProgram(("/no/such",)), "Started")
    with pytest.raises(HostError, match=r"cannot run .*/script: the interpreter that it names is missing"):
        await programs.spawn("web", MonitProgram((str(script),)), "Started")


async def test_programs_and_scripts_start_in_an_empty_directory(tmp_path: Path) -> None:
    """The scripts' working directory must not be ``/``, because a stackdriver-nozzle script in gcp-tools-release runs a
    recursive chown on it.
    """
    nowhere = tmp_path / "empty"
    nowhere.mkdir()
    programs = Programs(Paths(tmp_path))
    program = await programs.spawn("web", MonitProgram(("/bin/sh", "-c", "pwd; exec ls -A")), "Started")
    await program.wait()
    script = await programs.spawn_script(
        "web", ["/bin/pwd"], env={}, stdout=tmp_path / "said", stderr=tmp_path / "said"
    )
    await script.wait()

    assert await programs.printed("web") == [str(nowhere)]
    assert (tmp_path / "said").read_text() == f"{nowhere}\n"


async def test_script_can_read_job_files_by_relative_path(tmp_path: Path) -> None:
    """The smoke-tests errand in shared-redis-release reads ``../jobs/smoke-tests/config.json``."""
    (tmp_path / "jobs/smoke-tests").mkdir(parents=True)
    (tmp_path / "jobs/smoke-tests/config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    programs = Programs(Paths(tmp_path))

    errand = await programs.spawn_script("smoke-tests", ["/bin/cat", "../jobs/smoke-tests/config.json"], env={})

    assert await errand.wait() == 0


async def test_growing_program_output_is_truncated(tmp_path: Path) -> None:
    path, programs = output_of_web(tmp_path)
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * MAX_OUTPUT_BYTES + b"\nlast\n")
        await programs.trim()
        writer.write(b"next\n")

    assert path.stat().st_size <= MAX_OUTPUT_BYTES // 2 + 5
    assert path.read_bytes().endswith(b"x\nlast\nnext\n")
    assert end_of_last_line(await programs.printed("web")) == "next"


@pytest.mark.parametrize("text", ["first\nlast\n", ""])
def test_space_allocated_beyond_the_end_of_output_is_freed(tmp_path: Path, text: str) -> None:
    """A job could otherwise use up disk space in root's directory without making the file look large."""
    path, programs = output_of_web(tmp_path)
    path.write_text(text)
    subprocess.run(["fallocate", "--keep-size", "--length", "8M", path], check=True)

    asyncio.run(programs.trim())

    assert path.stat().st_blocks * 512 < MAX_OUTPUT_BYTES
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("+ web -d\nno port\n+ exit 1\n", "no port"),
        ("++ cat x\n+ exit 1\n", "+ exit 1"),
        ("+1 is told\n", "+1 is told"),
        ("\n", ""),
        ("y" * 10 * MAX_LAST_BYTES, "y" * MAX_LAST_BYTES),
    ],
    ids=["traced", "traced alone", "not traced", "nothing", "without an end"],
)
async def test_failure_reason_skips_shell_trace_lines(tmp_path: Path, printed: str, told: str) -> None:
    """With ``set -x``, the last line is the trace of the exit command, and the actual error is in an earlier line."""
    path, programs = output_of_web(tmp_path)
    path.write_text(printed)

    assert end_of_last_line(await programs.printed("web")) == told


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
async def test_ulimit_that_a_script_could_not_set_is_reported(tmp_path: Path, shell: str) -> None:
    """The script itself continues with the lower limit, so nobody would notice the problem without a report."""
    programs = Programs(Paths(tmp_path))
    script = "ulimit -n 64; ulimit -n 100000; echo on"
    user = "nobody" if os.geteuid() == 0 else None
    program = await programs.spawn("web", MonitProgram((shell, "-c", script), uid=user or ""), "Started")
    await program.wait()

    assert "ulimit: " in await programs.refused_limit("web")
    assert await programs.refused_limit("other") == ""


@pytest.mark.root
def test_failure_to_switch_user_is_reported(tmp_path: Path) -> None:
    """In a container without CAP_SETUID and CAP_SETGID, no program can run as another user."""
    program = f"""import asyncio
from pathlib import Path
from agent_shim.core.errors import HostError
from agent_shim.core.paths import Paths
from agent_shim.supervisor.ctl_programs import Programs
from agent_shim.supervisor.monit.ast import MonitProgram
async def become():
    try:
        await Programs(Paths(Path("{tmp_path}"))).spawn("web", MonitProgram(("/bin/true",), uid="nobody"), "Started")
    except HostError as exc:
        print(exc)
asyncio.run(become())"""
    without = ["/usr/bin/setpriv", "--bounding-set=-setuid,-setgid", sys.executable, "-c", program]
    done = subprocess.run(without, capture_output=True, text=True, check=True)

    assert done.stdout == "cannot run /bin/true: its groups: Operation not permitted\n"
