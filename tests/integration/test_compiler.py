"""Tests compilations that are interrupted by the agent's exit or crash, and other cases that the contract tests do not
cover.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_shim.bulk import protocol, workers
from agent_shim.bulk.protocol import BlobRef, Pack, Put
from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.demo.release import archive
from agent_shim.edges import control_client
from agent_shim.services.compiler import Compiler, Package
from agent_shim.supervisor.ownership.keepers import Keepers
from tests.support import jobs
from tests.support.instance import AGENT, COMMAND
from tests.support.instance import RunningAgent as Machine
from tests.support.instance import world as made
from tests.support.programs import end_kept, is_alive
from tests.support.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.usefixtures("keepers_are_closed")


FAMILY = """
trap '' TERM
sleep 600 & echo $! >> {pids}
setsid sleep 600 & echo $! >> {pids}
setsid -f sh -c 'echo $$ >> {pids}; trap "" TERM; sleep 600; sleep 600'
sleep 600
"""
"""A packaging script with three long-running processes: one in the script's process group, one in another session, and
one that is also detached from its parent.
"""


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    """Run an agent as a separate process that is connected to a bus."""
    async with made(COMMAND, poll=0.01) as one:
        await one.start_agent()
        yield one
        end_kept(Paths(one.base))


async def compiling(machine: Machine) -> list[int]:
    """Start a compilation that never finishes. Return the pids of the three processes that ``FAMILY`` starts."""
    pids = machine.scratch / "pids"
    blob = machine.blob("source", archive({"packaging": FAMILY.format(pids=pids)}))
    await machine.director.call(AGENT, "compile_package", blob["blobstore_id"], blob["sha1"], "p", "1", {})

    def three() -> list[int] | None:
        found = [int(line) for line in pids.read_text().split()] if pids.exists() else []
        return found if len(found) == 3 else None

    return await until(three)


def remaining_files(base: Path) -> list[Path]:
    places = ("packages/*", "data/packages/*/*", "data/compile/*", "data/tmp/.*")
    return [path for pattern in places for path in base.glob(pattern)]


async def test_status_names_the_package_that_is_being_compiled(machine: Machine) -> None:
    await compiling(machine)
    socket = Paths(machine.base).control_socket
    status = await asyncio.to_thread(control_client.ask, socket, {"command": "status"})

    assert (status["task"], status["task_progress"]) == ("compile_package", "p: running the packaging script")


async def test_agent_kills_the_running_compilation_when_it_exits(machine: Machine) -> None:
    pids = await compiling(machine)
    begun_at = time.monotonic()
    await machine.stop_agent()

    assert [is_alive(pid) for pid in pids] == [False] * 3
    assert remaining_files(machine.base) == []
    assert time.monotonic() - begun_at < TIMEOUT_S


async def test_restarted_agent_kills_a_compilation_left_by_a_killed_agent(machine: Machine) -> None:
    pids = await compiling(machine)
    await machine.kill_agent()
    assert [is_alive(pid) for pid in pids] == [True] * 3

    await machine.start_agent()

    assert [is_alive(pid) for pid in pids] == [False] * 3
    assert list((machine.base / "data/compile").iterdir()) == []
    blob = machine.blob("good", archive({"packaging": "true"}))
    await machine.director.run(AGENT, "compile_package", blob["blobstore_id"], blob["sha1"], "p", "1", {})
    assert remaining_files(machine.base) == []


# --- service without a supervisor -------------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path / "vcap")
    for directory in (paths.tmp, paths.packages, paths.log, tmp_path / "target"):
        directory.mkdir(parents=True)
    (paths.packages / "p").symlink_to(tmp_path / "target")
    return paths


@pytest.fixture
def store(tmp_path: Path) -> Blobstore:
    return Blobstore("local", {"blobstore_path": str(tmp_path / "store")})


def package(store: Blobstore, packaging: str) -> Package:
    blob = jobs.blob(Path(store.options["blobstore_path"]), archive({"packaging": packaging}))
    return Package("p", "1", BlobRef(blob["blobstore_id"], digest=blob["sha1"]))


async def test_package_source_is_removed_before_packing(paths: Paths, store: Blobstore, tmp_path: Path) -> None:
    """If the source and the result were on the disk at the same time, there might not be enough space for the
    archive.
    """
    seen: list[tuple[str, bool]] = []
    told: list[str] = []

    async def work(request: protocol.Request, **_: object) -> protocol.Done:
        if isinstance(request, Pack | Put):
            seen.append((told[-1], (paths.compile / "p").exists()))
        return await workers.execute(request)

    compiler = Compiler(paths, {}, Keepers(paths), work)
    await compiler.compile(package(store, "echo x >$BOSH_INSTALL_TARGET/x"), tmp_path / "target", store, told.append)

    assert seen == [("packing", False)]
    assert told[:3] == ["fetching the source", "running the packaging script", "packing"]
    assert list(paths.tmp.iterdir()) == []


@pytest.mark.attack("a job puts a link into a path in which root creates, opens or chowns files")
async def test_compilation_does_not_follow_a_link_in_place_of_the_log_directory(
    paths: Paths, store: Blobstore, tmp_path: Path
) -> None:
    """The vcap user may write to the compilation logs' parent directory. If root followed a link there, vcap
    could choose a directory that root empties.
    """
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    (paths.log / "compilation").symlink_to(victim)
    await Compiler(paths, {}, Keepers(paths)).compile(
        package(store, "true"), tmp_path / "target", store, lambda _: None
    )

    assert [path.name for path in victim.iterdir()] == ["file"]
    assert (paths.log / "compilation/packaging.stderr.log").read_text() == "+ true\n"


async def test_packaging_script_that_cannot_be_started_is_reported(
    paths: Paths, store: Blobstore, tmp_path: Path
) -> None:
    (paths.log / "compilation").mkdir()
    nowhere = {"PATH": "/nowhere"}
    with pytest.raises(
        ActionError, match="^Running packaging script: Running packaging script: cannot run bash: No such"
    ):
        await Compiler(paths, nowhere, Keepers(paths)).compile(
            package(store, ""), tmp_path / "target", store, lambda _: None
        )


async def test_compilations_of_another_agent_are_left_alone(paths: Paths, store: Blobstore, tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = package(store, f"echo $$ >{started}; exec sleep 600")
    running = asyncio.create_task(
        Compiler(paths, {}, Keepers(paths)).compile(script, tmp_path / "target", store, lambda _: None)
    )
    pid = await until(lambda: int(started.read_text()) if started.exists() and started.read_text() else None)
    other = Paths(tmp_path / "other")
    await Compiler(other, {}, Keepers(other)).clean()

    assert is_alive(pid)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not is_alive(pid)
