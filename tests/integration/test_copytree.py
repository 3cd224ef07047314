"""Tests copying directory trees with the real tar. A copy is exact, no links are followed, and an interrupted copy can
be completed.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agent_shim.bulk import copytree
from agent_shim.bulk.protocol import Progress
from agent_shim.core.errors import HostError
from agent_shim.host import files
from tests.support.users import as_ordinary_user
from tests.support.volumes import fill, fingerprint
from tests.support.waiting import until

ROOT = os.geteuid() == 0
RECORD_BYTES = 10240
"""Size of a tar record. Progress reports about the last record are ignored, because tar may exit before they are
handled.
"""
LEVELS = sys.getrecursionlimit() + 100


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Provide a source directory with one file of every type, and an empty target directory."""
    fill(tmp_path / "from", as_root=ROOT)
    (tmp_path / "to").mkdir()
    return tmp_path / "from", tmp_path / "to"


@pytest.fixture
def big(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add a large file to the source so that tar is still reading it when it first reports progress."""
    monkeypatch.setattr(copytree, "REPORT_PERIOD_S", 0.0)
    path = pair[0] / "big"
    path.write_bytes(os.urandom(1 << 20) * 16)
    return path


@pytest.mark.attack("a job tricks a disk migration into writing through links that the job created")
def test_tree_copy_is_exact(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Files whose names look like tar options are copied, and old links in the target are removed but not followed."""
    source, target = pair
    source.chmod(0o751)
    for name in ("--checkpoint=1", f"--checkpoint-action=exec=touch {tmp_path.name}", "-C", "--to-command=false"):
        (source / name).write_text("x")
    before = fingerprint(source)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("precious")
    (target / "db").symlink_to(elsewhere)
    (target / "twin").symlink_to(elsewhere / "data")
    (target / "surplus").mkdir()
    (target / "surplus/file").write_text("x")
    mask = os.umask(0o077)
    try:
        copytree.mirror(source, target)
    finally:
        os.umask(mask)

    assert fingerprint(target) == fingerprint(source) == before
    assert target.stat().st_mode == source.stat().st_mode
    assert (target / "sparse").stat().st_blocks * 512 < 1 << 20
    assert [path.name for path in elsewhere.iterdir()] == ["data"]
    assert (elsewhere / "data").read_text() == "precious"


def test_tree_copy_leaves_excluded_top_level_entries_untouched(pair: tuple[Path, Path]) -> None:
    source, target = pair
    for directory, text in ((source, "old"), (target, "new")):
        (directory / "mine").mkdir()
        (directory / "mine/text").write_text(text)
    (target / "lost+found").mkdir()
    for name in ("db/mine", "mine too"):
        (source / name).mkdir()

    copytree.mirror(source, target, spared={"mine", "lost+found"})

    assert (target / "mine/text").read_text() == "new"
    assert (target / "lost+found").is_dir()
    skipped = frozenset({"mine", "lost+found"})
    assert fingerprint(target, spared=skipped) == fingerprint(source, spared=skipped)


@pytest.mark.attack("a job tricks a disk migration into writing through links that the job created")
@pytest.mark.usefixtures("big")
def test_unfinished_copy_is_inaccessible_to_jobs(pair: tuple[Path, Path]) -> None:
    """If a job could write to the copy, it could replace a subdirectory with a link, and tar would write to the link's
    target.
    """
    source, target = pair
    for directory in pair:
        directory.chmod(0o777)
        if ROOT:
            os.chown(directory, 1000, 1000)
    seen = []

    def look(progress: Progress) -> None:
        if progress.phase == "copying" and progress.size < progress.size_total - RECORD_BYTES:
            seen.append((stat.S_IMODE(target.stat().st_mode), target.stat().st_uid))

    copytree.mirror(source, target, report=look)

    assert set(seen) == {(0o700, os.geteuid())}
    assert stat.S_IMODE(target.stat().st_mode) == 0o777
    assert target.stat().st_uid == source.stat().st_uid


def test_file_changed_during_the_copy_is_copied_again(pair: tuple[Path, Path], big: Path) -> None:
    source, target = pair
    phases = []

    def disturb(progress: Progress) -> None:
        phases.append(progress.phase)
        if (target / "big").exists() and phases.count("counting") == 1:
            with big.open("a") as file:
                file.write("more")

    copytree.mirror(source, target, report=disturb)

    assert fingerprint(target) == fingerprint(source)
    assert phases.count("counting") == 2


def test_copy_error_names_a_file_that_changes_constantly(pair: tuple[Path, Path], big: Path) -> None:
    source, target = pair
    phases = []

    def disturb(progress: Progress) -> None:
        phases.append(progress.phase)
        if progress.phase == "copying":
            with big.open("a") as file:
                file.write("more")

    with pytest.raises(HostError, match=r"cannot copy .*/from to .*/to: \./big: file changed as we read it"):
        copytree.mirror(source, target, report=disturb)
    assert phases.count("counting") == copytree.MAX_ATTEMPTS


@pytest.mark.attack("a job breaks a disk migration by creating a path or timestamp that cannot be copied")
def test_copying_a_tree_deeper_than_path_max_fails(pair: tuple[Path, Path]) -> None:
    """The copy is not retried. Any job can create such a deep tree, and retries would keep the agent busy."""
    source, target = pair
    phases = []
    name = "x" * 255
    here = os.open(source, os.O_RDONLY)
    for _ in range(20):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)

    with pytest.raises(HostError, match="File name too long"):
        copytree.mirror(source, target, report=lambda progress: phases.append(progress.phase))
    assert phases.count("counting") == 1


def nest(directory: Path, levels: int) -> None:
    here = os.open(directory, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_deep_tree_can_be_copied_over_an_earlier_copy(pair: tuple[Path, Path]) -> None:
    """The earlier copy must be removed without recursion, because the tree has more levels than Python's recursion
    limit.
    """
    source, target = pair
    nest(source, LEVELS)
    try:
        copytree.mirror(source, target)
        copytree.mirror(source, target)

        assert (target / "/".join(["d"] * LEVELS)).is_dir()
    finally:  # pytest cannot remove such a deep tree
        for top in pair:
            files.remove_tree(top)


@pytest.mark.parametrize(("stack", "message"), [(8 << 20, "File name too long"), (512 << 10, "tar ended with")])
def test_copying_a_tree_that_overflows_the_stack_of_tar_fails(
    pair: tuple[Path, Path], stack: int, message: str
) -> None:
    """With a stack of 8 MiB, tar reports an error. With 512 KiB, it crashes without a message, so the error contains
    the signal.
    """
    nest(pair[0], 2100)
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
    try:
        with pytest.raises(HostError, match=message):
            copytree.mirror(*pair)
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
        for top in pair:
            files.remove_tree(top)


@pytest.mark.usefixtures("big")
def test_copy_progress_increases_and_reaches_its_total(pair: tuple[Path, Path]) -> None:
    seen: list[Progress] = []

    copytree.mirror(*pair, report=seen.append)

    assert [progress.phase for progress in seen[:2]] == ["counting", "copying"]
    assert seen[-1].share == 1
    assert seen[-1].size > 16 << 20
    assert [progress.size for progress in seen] == sorted(progress.size for progress in seen)


def test_interrupted_copy_is_completed_by_the_next_copy(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    fill(source, as_root=ROOT)
    for number in range(400):
        (source / f"db/{number}").write_bytes(os.urandom(2000))
        if number % 20 == 0:
            os.link(source / f"db/{number}", source / f"db/wal/{number}")
    target.mkdir()
    wanted = fingerprint(source)
    for attempt in range(12):
        pid = os.fork()
        if pid == 0:
            copytree.mirror(source, target)
            os._exit(0)
        time.sleep(0.006 * (attempt + 1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    copytree.mirror(source, target)

    assert fingerprint(target) == wanted
    assert fingerprint(source) == wanted


@pytest.mark.usefixtures("big")
async def test_tar_is_killed_when_the_process_that_runs_it_is_killed(pair: tuple[Path, Path]) -> None:
    """If tar kept running, it would write to the target at the same time as the next copy. A closed pipe does not stop
    tar as long as another process holds the pipe open.
    """
    source, target = pair
    reading, writing = os.pipe()

    def wait(progress: Progress) -> None:
        if progress.phase == "copying":
            holder = os.fork()  # this process keeps tar's pipes open
            if holder:
                os.write(writing, holder.to_bytes(4, "big"))
            signal.pause()

    pid = os.fork()
    if pid == 0:
        copytree.mirror(source, target, report=wait)
        os._exit(0)
    holder = int.from_bytes(os.read(reading, 4), "big")
    assert len(commands_about(pair)) == 2
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, pid, 0)

    try:
        await until(lambda: not commands_about(pair))
    finally:
        os.kill(holder, signal.SIGKILL)


def commands_about(pair: tuple[Path, Path]) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == b"tar" and any(os.fsencode(each) in words for each in pair):
            found.append(words[0])
    return found


@pytest.mark.root
def test_ordinary_user_can_copy_to_a_group_writable_volume() -> None:
    """The user does not own the target, because the kubelet makes root the owner of a pod's volumes and gives them the
    pod's group.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "target")
        (source / "d").mkdir(parents=True)
        (source / "d/file").write_text("x")
        (source / "d").chmod(0o500)
        target.mkdir()
        os.chown(target, 0, os.getegid())
        target.chmod(0o2775)
        for path in (Path(scratch), source, *source.rglob("*")):
            os.chown(path, 1000, os.getegid())
        for _ in range(2):
            with as_ordinary_user():
                copytree.mirror(source, target)

            assert (target / "d/file").read_text() == "x"
            assert stat.S_IMODE((target / "d").stat().st_mode) == 0o500
        assert stat.S_IMODE(target.stat().st_mode) == 0o2775
