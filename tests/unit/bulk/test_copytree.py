"""Comparisons and rights of copies, entry by entry; ``integration/test_copytree.py`` copies whole trees."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from agent_shim.bulk import copytree
from agent_shim.bulk.protocol import Progress
from agent_shim.host import guarded
from tests.support.users import as_ordinary_user

SECOND_NS = 1_000_000_000


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    return tmp_path / "source", tmp_path / "target"


@pytest.mark.parametrize(
    ("off_ns", "is_same"), [(1, True), (copytree.COARSE_NS - 1000, True), (copytree.COARSE_NS, False)]
)
def test_a_file_system_that_rounds_times_has_the_same_file(pair: tuple[Path, Path], off_ns: int, is_same: bool) -> None:
    """It is not copied again."""
    source, target = pair
    (source / "a").write_text("x")
    os.utime(source / "a", ns=(SECOND_NS, SECOND_NS + off_ns))
    (target / "a").write_text("x")
    (target / "a").chmod((source / "a").stat().st_mode)
    os.utime(target / "a", ns=(SECOND_NS, SECOND_NS))
    before = (target / "a").stat().st_ino
    held = (target / "a").open()

    copytree.mirror(source, target)

    held.close()
    assert ((target / "a").stat().st_ino == before) is is_same


def test_the_mask_of_this_process_takes_nothing_from_a_pipe(pair: tuple[Path, Path]) -> None:
    source, target = pair
    os.mkfifo(source / "pipe")
    (source / "pipe").chmod(0o666)
    before = os.umask(0o077)
    try:
        copytree.mirror(source, target)
    finally:
        os.umask(before)

    assert stat.S_IMODE((target / "pipe").stat().st_mode) == 0o666


def test_a_directory_that_differs_is_copied_again_and_not_removed(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mode may change while it is copied."""
    source, target = pair
    (source / "d").mkdir()
    (source / "d" / "file").write_text("x")
    (source / "a").touch()
    monkeypatch.setattr(copytree, "REPORT_PERIOD_S", 0.0)

    def change(progress: Progress) -> None:
        if progress.phase == "comparing":
            (source / "d").chmod(0o701)

    copytree.mirror(source, target, report=change)

    assert stat.S_IMODE((target / "d").stat().st_mode) == 0o701
    assert (target / "d" / "file").read_text() == "x"


def test_who_may_not_spare_the_time_of_access_reads_all_the_same(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the owner and root may."""
    source, target = pair
    (source / "file").write_text("x")
    honest = guarded.reopen

    def reopen(descriptor: int, flags: int) -> int:
        if flags & os.O_NOATIME:
            raise PermissionError(1, "Operation not permitted")
        return honest(descriptor, flags)

    monkeypatch.setattr(guarded, "reopen", reopen)
    copytree.mirror(source, target)

    assert (target / "file").read_text() == "x"


def test_links_that_are_right_are_not_made_again(pair: tuple[Path, Path]) -> None:
    """Those of another file are."""
    source, target = pair
    (source / "a").write_text("x")
    (source / "b").hardlink_to(source / "a")
    (target / "b").write_text("other")
    copytree.mirror(source, target)
    before = [(target / name).stat() for name in "ab"]
    assert before[0].st_ino == before[1].st_ino

    copytree.mirror(source, target)

    assert [(target / name).stat().st_ctime_ns for name in "ab"] == [each.st_ctime_ns for each in before]


def test_two_names_of_one_file_are_no_copy_of_two_files(pair: tuple[Path, Path]) -> None:
    """A write to one would change the other."""
    source, target = pair
    for path in (source / "a", source / "b", target / "a"):
        path.write_text("x")
        os.utime(path, ns=(SECOND_NS, SECOND_NS + 1))
    (target / "b").hardlink_to(target / "a")

    copytree.mirror(source, target)

    assert (target / "a").stat().st_ino != (target / "b").stat().st_ino
    assert [(target / name).read_text() for name in "ab"] == ["x", "x"]


def test_a_link_with_two_names_keeps_both(pair: tuple[Path, Path]) -> None:
    """It is not followed: its target may lie outside."""
    source, target = pair
    (source.parent / "outside").write_text("x")
    (source / "a").symlink_to("../outside")
    os.link(source / "a", source / "b", follow_symlinks=False)

    copytree.mirror(source, target)

    assert (target / "b").is_symlink()
    assert (target / "b").lstat().st_ino == (target / "a").lstat().st_ino


def test_half_a_copy_is_open_to_its_owner_alone(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others could read a directory of secrets until it has its own mode."""
    source, target = pair
    (source / "d").mkdir(mode=0o755)
    (source / "d" / "file").write_text("x")
    modes: list[int] = []
    honest = os.pwrite

    def written(new: int, *rest: Any) -> int:
        modes.extend(stat.S_IMODE(each.st_mode) for each in (os.fstat(new), (target / "d").stat()))
        return honest(new, *rest)

    monkeypatch.setattr(os, "pwrite", written)
    before = os.umask(0)
    try:
        copytree.mirror(source, target)
    finally:
        os.umask(before)

    assert modes[:2] == [0o600, 0o700]
    assert stat.S_IMODE((target / "d").stat().st_mode) == stat.S_IMODE((source / "d").stat().st_mode)


def test_the_first_byte_is_compared(pair: tuple[Path, Path]) -> None:
    """And a file of one."""
    source, target = pair
    for path, content in ((source / "a", b"1"), (target / "a", b"2"), (source / "b", b"1x"), (target / "b", b"2x")):
        path.write_bytes(content)
        os.utime(path, ns=(SECOND_NS, SECOND_NS + 1))

    copytree.mirror(source, target)

    assert [(target / name).read_bytes() for name in "ab"] == [b"1", b"1x"]


def test_an_ordinary_user_copies_into_a_directory_that_an_earlier_pass_has_closed() -> None:
    """Its mode was set, and then a file was removed that differed."""
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "target")
        for top in (source, target):
            (top / "d").mkdir(parents=True)
        (source / "d/file").write_text("x")
        for top in (source, target):
            (top / "d").chmod(0o500)
        if os.geteuid() == 0:
            for path in (Path(scratch), *Path(scratch).rglob("*")):
                os.chown(path, 1000, -1)
        with as_ordinary_user():
            copytree.mirror(source, target)

        assert (target / "d/file").read_text() == "x"
        assert stat.S_IMODE((target / "d").stat().st_mode) == 0o500
