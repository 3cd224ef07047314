"""Tests rotating a single log. ``integration/test_rotation.py`` rotates logs while they are written."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from pathlib import Path

import pytest

from agent_shim.bulk import copytruncate
from agent_shim.core.errors import HostError
from agent_shim.host import files


def rotate(directory: Path, keep: int = 3, most: int = 1000) -> copytruncate.Moved:
    root = os.open(directory, os.O_RDONLY)
    try:
        return copytruncate.rotate(root, "a.log", keep, most)
    finally:
        os.close(root)


def archives(directory: Path) -> dict[str, bytes]:
    return {path.name: gzip.decompress(path.read_bytes()) for path in directory.glob("*.gz")}


def test_rotation_keeps_the_configured_number_of_archives(tmp_path: Path) -> None:
    """An archive is left alone if there is a gap in the numbers before it."""
    (tmp_path / "a.log.9.gz").write_bytes(gzip.compress(b"kept"))
    for number in range(5):
        (tmp_path / "a.log").write_bytes(b"%d" % number)
        assert rotate(tmp_path) == (1, 0)
        assert (tmp_path / "a.log").stat().st_size == 0

    assert archives(tmp_path) == {
        "a.log.1.gz": b"4",
        "a.log.2.gz": b"3",
        "a.log.3.gz": b"2",
        "a.log.9.gz": b"kept",
    }
    assert rotate(tmp_path) == (0, 0)


def test_rotated_archive_has_the_owner_and_mode_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_bytes(b"x")
    (tmp_path / "a.log").chmod(0o4640)
    given: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "fchown", lambda fd, uid, gid: given.append((stat.S_IMODE(os.fstat(fd).st_mode), uid, gid)))
    before = os.umask(0)
    try:
        rotate(tmp_path)
    finally:
        os.umask(before)

    status = (tmp_path / "a.log").stat()
    assert [mode for mode, _, _ in given] == [0o600, 0o600]
    assert given[-1][1:] == (status.st_uid, status.st_gid)
    assert stat.S_IMODE((tmp_path / "a.log.1.gz").stat().st_mode) == 0o640


def test_failed_rotation_keeps_the_log_and_leaves_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_bytes(b"precious")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HostError, match="cannot rotate a.log: No space left on device"):
        rotate(tmp_path)

    assert (tmp_path / "a.log").read_bytes() == b"precious"
    assert archives(tmp_path) == {}


def test_archive_is_kept_if_the_disk_is_full_once_the_log_has_been_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At that point, only the checksum at the end of the archive is still missing."""
    (tmp_path / "a.log").write_bytes(b"precious")
    truncate = os.ftruncate

    def full(_fd: int, _data: bytes) -> None:
        raise OSError(28, "No space left on device")

    def fill_disk(fd: int, size: int) -> None:
        truncate(fd, size)
        monkeypatch.setattr(files, "write_all", full)

    monkeypatch.setattr(os, "ftruncate", fill_disk)

    assert rotate(tmp_path) == (8, 0)
    packed = (tmp_path / "a.log.1.gz").read_bytes()
    assert zlib.decompressobj(wbits=31).decompress(packed) == b"precious"


def test_archive_size_limit_is_shared_by_all_data_ranges_of_a_sparse_log(tmp_path: Path) -> None:
    with (tmp_path / "a.log").open("wb") as file:
        file.write(b"a" * 4096)
        file.seek(1 << 20)
        file.write(b"b" * 4096)

    moved = rotate(tmp_path, most=4096)

    assert moved == (4096, 4096)
    assert archives(tmp_path) == {
        "a.log.1.gz": b"(4096 bytes before this were too many to keep)\n" + b"b" * 4096,
    }


def test_rotation_counts_a_dangling_symlink_as_an_archive(tmp_path: Path) -> None:
    """If the symlink were ignored, it would keep the first archive's name, and no new archive could be created."""
    (tmp_path / "a.log.1.gz").symlink_to("nowhere")
    (tmp_path / "a.log").write_bytes(b"new")

    rotate(tmp_path)

    assert gzip.decompress((tmp_path / "a.log.1.gz").read_bytes()) == b"new"
    assert (tmp_path / "a.log.2.gz").is_symlink()


def test_rotation_empties_the_log_only_after_the_archive_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"precious")
    synced: list[tuple[bytes, bytes]] = []

    def fsync(fd: int) -> None:
        packed = Path(f"/proc/self/fd/{fd}").read_bytes()
        synced.append((zlib.decompressobj(31).decompress(packed), log.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    rotate(tmp_path)

    assert synced == [(b"precious", b"precious")]


def test_rotated_log_is_truncated_only_after_its_archive_contains_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.log").write_bytes(b"before\n")
    fsync, truncate, archived = os.fsync, os.ftruncate, []

    def write_meanwhile(fd: int) -> None:
        with (tmp_path / "a.log").open("ab") as log:
            log.write(b"meanwhile\n")
        fsync(fd)

    def look(fd: int, size: int) -> None:
        archived.append(zlib.decompressobj(wbits=31).decompress((tmp_path / "a.log.1.gz").read_bytes()))
        truncate(fd, size)

    monkeypatch.setattr(os, "fsync", write_meanwhile)
    monkeypatch.setattr(os, "ftruncate", look)
    rotate(tmp_path)

    assert archived == [b"before\nmeanwhile\n"]
