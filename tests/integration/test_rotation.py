"""Tests how the real worker rotates job logs while programs write to the logs."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from agent_shim.bulk import copytruncate
from agent_shim.core.errors import HostError
from agent_shim.core.paths import Paths
from agent_shim.host import files, process
from agent_shim.services.logs import rotation
from agent_shim.services.logs.rotation import Rotation, RotationLimits
from tests.support.waiting import until

SMALL = RotationLimits(size=100, keep=2, total=1 << 20)
MOST = 1 << 30


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Provide a scratch tree's ``sys/log`` directory."""
    paths = Paths(tmp_path)
    (paths.log / "web/deep").mkdir(parents=True)
    return paths.log


@pytest.fixture
def good(logs: Path) -> Path:
    """Add another job's log, which is large enough to be rotated."""
    path = logs / "zoo/good.log"
    path.parent.mkdir()
    path.write_text("g" * 1000)
    return path


def rotator(logs: Path, limits: RotationLimits = SMALL, told: str = "") -> Rotation:
    return Rotation(Paths(logs.parents[2]), limits, lambda: told)


def rotate_log(logs: Path, path: str, most: int) -> copytruncate.Moved:
    """Rotate one log. Return how many bytes were moved and how many were lost."""
    root = os.open(logs, os.O_RDONLY)
    try:
        return copytruncate.rotate(root, path, 7, most)
    finally:
        os.close(root)


def archived(log: Path, number: int = 1) -> bytes:
    return gzip.decompress(log.with_name(f"{log.name}.{number}.gz").read_bytes())


async def test_large_logs_are_compressed_and_truncated(logs: Path) -> None:
    large = [logs / "top.log", logs / "web/web.stdout.log", logs / "web/deep/.hidden.log"]
    left = [logs / "web/small.log", logs / "web/data.txt", logs / "web/deep/deeper/x.log"]
    left[2].parent.mkdir()
    for path in large + left:
        path.write_text("x" * (50 if path.name == "small.log" else 200))
    large[1].chmod(0o640)

    await rotator(logs).rotate()

    assert [path.stat().st_size for path in large] == [0, 0, 0]
    assert [path.stat().st_size for path in left] == [200 if path.name != "small.log" else 50 for path in left]
    assert [archived(path) for path in large] == [b"x" * 200] * 3
    assert stat.S_IMODE(logs.joinpath("web/web.stdout.log.1.gz").stat().st_mode) == 0o640


async def test_log_archives_are_renumbered_and_the_oldest_is_removed(logs: Path) -> None:
    log = logs / "web/web.log"
    for text in ("one", "two", "three"):
        log.write_text(text * 100)
        await rotator(logs).rotate()

    assert sorted(path.name for path in log.parent.glob("web.log*")) == ["web.log", "web.log.1.gz", "web.log.2.gz"]
    assert archived(log, 1) == b"three" * 100
    assert archived(log, 2) == b"two" * 100


async def test_log_archives_have_a_total_size_limit(logs: Path) -> None:
    for age, name in enumerate(["web/new.log.1.gz", "web/old.log.3.gz", "top.log.1.gz", "web/x.log"]):
        (logs / name).write_bytes(os.urandom(8192))
        os.utime(logs / name, (0, 1_000_000 - age))

    await rotator(logs, RotationLimits(size=1 << 20, total=9000)).rotate()

    left = sorted(path.name for path in logs.rglob("*.*") if path.is_file())
    assert left == ["new.log.1.gz", "x.log"]


async def test_log_rotation_loses_lines_only_at_the_moment_of_truncation(logs: Path) -> None:
    log = logs / "web/web.log"
    code = """
import os, sys
out = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in range(4000):
    os.write(out, b"%06d\\n" % number)
    if number % 40 == 0:
        os.sched_yield()
"""
    writer = process.spawn([sys.executable, "-S", "-E", "-c", code, str(log)], env={})
    root = os.open(logs, os.O_RDONLY)
    try:
        await until(log.exists)
        while writer.is_alive:
            await asyncio.to_thread(copytruncate.rotate, root, "web/web.log", 10_000, MOST)
    finally:
        os.close(root)
    await writer.wait()
    numbers = sorted(log.parent.glob("web.log.*.gz"), key=lambda path: -int(path.name.split(".")[2]))
    lines = b"".join([*(gzip.decompress(path.read_bytes()) for path in numbers), log.read_bytes()]).splitlines()

    # Lines that are written between the last read and the truncation are lost, and the first line after the gap may be
    # cut. The number of lost lines depends on the scheduler, so the test counts only the gaps.
    whole = [line for line in lines if len(line) == 6]
    assert whole == sorted(set(whole))
    assert len(lines) - len(whole) <= len(numbers)
    known = [-1, *map(int, whole), 4000]
    assert sum(after - before > 1 for before, after in itertools.pairwise(known)) <= len(numbers) + 1


def test_log_lines_written_while_a_rotation_syncs_are_kept(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, burst = logs / "web/web.log", b"more\n" * (8 << 20)
    log.write_bytes(b"first\n")

    def slow(descriptor: int) -> None:
        with log.open("ab") as file:
            file.write(burst)

    monkeypatch.setattr(os, "fsync", slow)

    assert rotate_log(logs, "web/web.log", MOST) == (len(b"first\n") + len(burst), 0)
    assert archived(log) == b"first\n" + burst
    assert log.stat().st_size == 0


async def test_rotating_a_huge_log_keeps_its_end(logs: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, older, large = logs / "web/runaway.log", logs / "web/older.log.1.gz", logs / "web/large.log"
    older.write_bytes(os.urandom(400_000))
    content = os.urandom(5_000_000)
    log.write_bytes(content)
    limits = RotationLimits(size=200_000, total=1_000_000)
    await rotator(logs, limits).rotate()
    kept = archived(log)

    assert kept == b"(4500000 bytes before this were too many to keep)\n" + content[-500_000:]
    assert log.stat().st_size == 0
    assert older.exists()
    told = "web/runaway.log was too large to keep: its first 4500000 bytes are lost, the last 500000 are in its archive"
    assert told in caplog.text
    large.write_bytes(b"x" * 150_000)
    await rotator(logs, RotationLimits(size=100_000, total=100_000)).rotate()
    assert archived(large) == b"x" * 150_000


async def test_logs_are_rotated_in_order_of_size(logs: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"a.log": 30_000, "b.log": 10_000, "web/a.log": 20_000}
    for name, size in sizes.items():
        (logs / name).write_bytes(b"x" * size)

    caplog.set_level("INFO")

    await rotator(logs, RotationLimits(size=1000)).rotate()

    assert "rotating b.log, web/a.log, a.log" in caplog.messages


def test_endless_writer_does_not_hold_up_log_rotation(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is truncated once it has grown by half during its compression, even if the program keeps writing."""
    log, size = logs / "web/web.log", 4 * files.CHUNK_BYTES
    log.write_bytes(b"x" * size)
    read = os.read

    def written_meanwhile(descriptor: int, count: int) -> bytes:
        with log.open("ab") as file:
            file.write(b"y" * count)
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", written_meanwhile)

    assert rotate_log(logs, "web/web.log", size) == (size + size // 2, 0)
    assert log.stat().st_size == 0


async def test_hole_in_a_log_left_by_a_non_appending_writer_is_not_counted(logs: Path) -> None:
    """After the truncation, the program continues to write at its old position, which leaves a hole at the beginning of
    the file.
    """
    log = logs / "web/web.log"
    with log.open("wb", buffering=0) as out:
        out.write(b"x" * 2_000_000)
        await rotator(logs, RotationLimits(size=100_000)).rotate()
        out.write(b"y" * 50_000)
        await rotator(logs, RotationLimits(size=100_000)).rotate()
        assert not log.with_name("web.log.2.gz").exists()
        out.write(b"z" * 150_000)
        await rotator(logs, RotationLimits(size=100_000)).rotate()

    assert archived(log, 2) == b"x" * 2_000_000
    assert archived(log, 1).lstrip(b"\0") == b"y" * 50_000 + b"z" * 150_000
    assert len(archived(log, 1)) < 300_000


async def test_deployment_log_size_overrides_the_configured_one(logs: Path) -> None:
    log = logs / "web/web.log"
    log.write_text("x" * 5000)

    await rotator(logs, SMALL, "1M").rotate()
    assert log.stat().st_size == 5000
    await rotator(logs, SMALL, "4k").rotate()
    assert log.stat().st_size == 0
    log.write_text("x" * 5000)
    await rotator(logs, SMALL, "plenty").rotate()
    assert log.stat().st_size == 0


@pytest.mark.attack("a job exposes other users' files through symlinks or hard links in its log directory")
async def test_log_rotation_ignores_symlinks_and_hard_links(logs: Path, tmp_path: Path) -> None:
    """If the agent followed links, a job could make it read or truncate any file on the machine, or change its
    owner.
    """
    secret = tmp_path / "secret"
    secret.write_text("s" * 1000)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.log").write_text("s" * 1000)
    (logs / "web/link.log").symlink_to(secret)
    os.link(secret, logs / "web/second.log")
    (logs / "web/dir").symlink_to(elsewhere)
    os.mkfifo(logs / "web/pipe.log")
    (logs / "web/good.log").write_text("g" * 1000)
    (logs / "web/good.log.1.gz").symlink_to(secret)

    await rotator(logs).rotate()

    assert secret.read_text() == "s" * 1000
    assert (elsewhere / "x.log").read_text() == "s" * 1000
    assert archived(logs / "web/good.log") == b"g" * 1000
    assert not (logs / "web/good.log.1.gz").is_symlink()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["x.log"]
    root = os.open(logs, os.O_RDONLY)
    try:
        with pytest.raises(HostError, match=r"cannot rotate web/link\.log.*a symbolic link"):
            copytruncate.rotate(root, "web/link.log", 7, MOST)
        with pytest.raises(HostError, match="cannot rotate web/dir/x.log.*a symbolic link"):
            copytruncate.rotate(root, "web/dir/x.log", 7, MOST)
        for name in ("second", "pipe"):
            assert copytruncate.rotate(root, f"web/{name}.log", 7, MOST) == (0, 0)
    finally:
        os.close(root)


async def test_logrotate_rule_is_disabled_while_the_agent_rotates_logs(logs: Path) -> None:
    """The Go agent has installed a logrotate rule for the same logs. A handback enables the rule again."""
    rule = Paths(logs.parents[2]).logrotate_rule
    rule.parent.mkdir(parents=True)
    rule.write_text("the Go agent's")
    log = logs / "web/web.log"
    log.write_text("x" * 200)

    task = asyncio.create_task(rotator(logs, RotationLimits(size=100, period=0.01)).run())
    await until(lambda: log.with_name("web.log.1.gz").exists() and not log.stat().st_size)
    assert [path.name for path in rule.parent.iterdir()] == ["vcap.disabled"]
    task.cancel()
    await asyncio.wait([task])

    rotation.enable_rule(rule)
    rotation.enable_rule(rule)
    assert [path.read_text() for path in rule.parent.iterdir()] == ["the Go agent's"]
    assert rule.exists()


async def test_agent_does_not_rotate_logs_if_logrotate_cannot_be_disabled(
    logs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If ``/etc`` is read-only, logrotate stays enabled, so the agent must not rotate the same logs as well."""
    rule = Paths(logs.parents[2]).logrotate_rule
    rule.parent.mkdir(parents=True)
    rule.write_text("the Go agent's")
    (rule.parent / "vcap.disabled").mkdir()  # the rule cannot be renamed over a directory
    log = logs / "web/web.log"
    log.write_text("x" * 200)

    task = asyncio.create_task(rotator(logs, RotationLimits(size=100, period=0.01)).run())
    await until(lambda: caplog.text.count("logrotate rotates the logs of jobs") > 1)
    task.cancel()
    await asyncio.wait([task])

    assert log.stat().st_size == 200
    assert rule.exists()


def test_disabled_log_rotation_enables_the_logrotate_rule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = Paths(tmp_path).logrotate_rule
    rule.parent.mkdir(parents=True)
    out_of_force = rule.with_name("vcap.disabled")
    out_of_force.write_text("the Go agent's")
    rotation.leave_to_logrotate(rule)
    assert rule.read_text() == "the Go agent's"

    rule.rename(out_of_force)
    rule.mkdir()
    rotation.leave_to_logrotate(rule)
    assert "cannot leave the logs of jobs to logrotate: cannot enable" in caplog.text


async def test_log_that_cannot_be_rotated_does_not_block_other_logs(
    logs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log cannot be rotated, because a directory already has the archive's name."""
    (logs / "web/bad.log").write_text("b" * 1000)
    (logs / "web/bad.log.2.gz").mkdir()
    (logs / "web/bad.log.1.gz").mkdir()
    (logs / "web/good.log").write_text("g" * 1000)

    await rotator(logs).rotate()

    assert "cannot rotate web/bad.log" in caplog.text
    assert (logs / "web/bad.log").read_text() == "b" * 1000
    assert archived(logs / "web/good.log") == b"g" * 1000


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("100", 100), ("4k", 4096), ("50M", 50 << 20), ("2G", 2 << 30)),
        *((text, None) for text in ("", "M", "-1", "1T", "1.5G", "50 MB")),
    ],
)
def test_log_sizes_use_logrotate_syntax(text: str, number: int | None) -> None:
    if number is not None:
        assert rotation.size(text) == number
        return
    with pytest.raises(ValueError, match="is not a size"):
        rotation.size(text)


# --- hostile changes during a rotation --------------------------------------------------------------------------------


@pytest.mark.attack("a job gives its logs names that are not UTF-8")
async def test_log_with_a_name_in_invalid_utf_8_is_rotated(logs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The agent must escape the name in its log. Otherwise, the name could forge lines or control a terminal."""
    caplog.set_level("INFO")
    evil = logs / "web" / os.fsdecode(b"\xff\n\x1b[2J.log")
    for path in (evil, logs / "web/good.log"):
        path.write_text("x" * 1000)

    await rotator(logs).rotate()

    assert archived(evil) == b"x" * 1000
    assert archived(logs / "web/good.log") == b"x" * 1000
    assert "web/\\udcff\\n\\x1b[2J.log" in caplog.text
    (logs / "web" / f"{evil.name}.1.gz").write_bytes(os.urandom(8192))
    await rotator(logs, RotationLimits(size=1 << 20, total=4096)).rotate()
    assert not evil.with_name(f"{evil.name}.1.gz").exists()


async def test_oldest_log_archives_are_removed_first(logs: Path) -> None:
    """Empty archives are not removed, because they use no space."""
    for number in range(500):
        path = logs / f"web/x{number}.log.1.gz"
        path.write_bytes(b"" if number % 2 else b"x")
        os.utime(path, (number, number))

    await rotator(logs, RotationLimits(size=1 << 20, total=245)).rotate()

    assert len(list(logs.glob("web/x*.gz"))) == 495
    assert not any((logs / f"web/x{number}.log.1.gz").exists() for number in range(0, 10, 2))


async def test_job_with_too_many_files_does_not_block_log_rotation_for_other_jobs(
    logs: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "MAX_JOB_ENTRIES", 50)
    for number in range(200):
        (logs / f"web/{number}.gz").touch()

    await rotator(logs).rotate()

    assert archived(good) == b"g" * 1000


@pytest.mark.parametrize("planted", ["second names", "names that leave no room for an archive"])
async def test_many_logs_in_one_job_do_not_block_log_rotation_for_other_jobs(
    logs: Path, good: Path, planted: str
) -> None:
    for number in range(8):
        path = logs / f"web/{number}.log"
        if planted == "second names" and number:
            path.hardlink_to(logs / "web/0.log")
            continue
        if planted == "names that leave no room for an archive":
            path = logs / f"web/{number}{'x' * 250}.log"
        path.write_text("x" * 150)

    await rotator(logs).rotate()

    assert archived(good) == b"g" * 1000


@pytest.mark.parametrize("planted", ["second names", "archives of the future"])
async def test_log_archives_of_one_job_do_not_displace_those_of_other_jobs(logs: Path, planted: str) -> None:
    (logs / "zoo").mkdir()
    good = logs / "zoo/good.log.1.gz"
    good.write_bytes(os.urandom(8192))
    os.utime(good, (1_000_000, 1_000_000))
    for number in range(1, 9):
        path = logs / f"web/x.log.{number}.gz"
        if planted == "second names" and number > 1:
            path.hardlink_to(logs / "web/x.log.1.gz")
        else:
            path.write_bytes(os.urandom(8192))
            os.utime(path, (1 << 32, 1 << 32))

    await rotator(logs, RotationLimits(size=1 << 20, total=40_000)).rotate()

    assert good.exists()
    assert len(list(logs.glob("web/*.gz"))) == (8 if planted == "second names" else 3)


async def test_hanging_volume_does_not_block_log_rotation_for_other_jobs(
    logs: Path, good: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a file server does not respond, only the thread that lists that job's logs hangs."""
    gate = threading.Event()
    honest = rotation.look_at

    def look_at(root: Path, job: str, limit: int) -> tuple[list[rotation.Found], list[rotation.Found]]:
        if job == "web":
            gate.wait()
        return honest(root, job, limit)

    monkeypatch.setattr(rotation, "look_at", look_at)
    monkeypatch.setattr(rotation, "LOOK_TIMEOUT_S", 2.0)
    try:
        await rotator(logs).rotate()
    finally:
        gate.set()

    assert archived(good) == b"g" * 1000
    assert "cannot rotate the logs of web" in caplog.text
