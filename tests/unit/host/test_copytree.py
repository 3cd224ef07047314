"""Comparisons and rights of copies, entry by entry; ``integration/test_copytree.py`` copies whole trees."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_shim.host import copytree, guarded

SECOND_NS = 1_000_000_000


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    return tmp_path / "source", tmp_path / "target"


def status(**changes: int) -> Any:
    members = {"st_mode": stat.S_IFREG | 0o644, "st_uid": 1, "st_gid": 2, "st_size": 3, "st_rdev": 0, "st_nlink": 1}
    return SimpleNamespace(**members | {"st_mtime_ns": SECOND_NS + 1, "st_blocks": 8} | changes)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"st_mode": stat.S_IFREG | 0o600}, False),
        ({"st_uid": 9}, False),
        ({"st_gid": 9}, False),
        ({"st_size": 9}, False),
        ({"st_rdev": 9}, False),
        ({"st_mtime_ns": SECOND_NS + 2}, False),
        ({"st_mtime_ns": SECOND_NS}, True),
        ({"st_mtime_ns": SECOND_NS + copytree.COARSE_NS - 1000}, True),
        ({"st_mtime_ns": SECOND_NS + copytree.COARSE_NS + 1000}, False),
    ],
)
def test_an_entry_looks_the_same_by_all_that_is_copied(changes: dict[str, int], is_same: bool) -> None:
    """A file system that rounds times may be off by its grain."""
    assert copytree._looks_same(status(), status(**changes)) is is_same


def test_the_size_of_a_directory_is_no_difference() -> None:
    one, other = (status(st_mode=stat.S_IFDIR | 0o755, st_size=size) for size in (3, 4096))

    assert copytree._looks_same(one, other)


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
    honest, doubts = copytree._same_entry, ["d"]

    def same(one: int, other: int, name: str, *rest: Any) -> bool:
        if name in doubts:
            doubts.remove(name)
            return False
        return honest(one, other, name, *rest)

    monkeypatch.setattr(copytree, "_same_entry", same)
    copytree.mirror(source, target)

    assert doubts == []
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
