"""Tests parsing the mount table and finding the mount that is visible at a path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_shim.host import mounts

# An initramfs moved /proc below a newer root. /vol is a bind mount whose source path contains a space. /a is mounted
# over an earlier mount at /a/b.
TABLE = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard
40 27 8:1 /pods/7\040x/vol /vol rw,nosuid - xfs /dev/sda1 rw
41 27 0:50 / /a/b ro,relatime - tmpfs none rw
42 27 0:51 / /a rw - tmpfs over\134lay rw
43 42 0:52 / /a rw - tmpfs newest rw
"""


@pytest.fixture
def table() -> list[mounts.Mount]:
    return mounts.parse(TABLE)


def test_mount_fields_are_parsed(table: list[mounts.Mount]) -> None:
    vol = table[2]

    assert (vol.device, vol.root, vol.point, vol.kind, vol.source) == (
        "8:1",
        "/pods/7 x/vol",
        Path("/vol"),
        "xfs",
        "/dev/sda1",
    )
    assert table[1].source == "/dev/vda"
    assert table[4].source == "over\\lay"
    assert ["ro" in mount.options for mount in table] == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/proc/1/stat", "proc"),
        ("/etc/hosts", "/dev/vda"),
        ("/volume", "/dev/vda"),
        ("/vol/x", "/dev/sda1"),
        ("/a/b/c", "newest"),
    ],
)
def test_visible_mount_at_a_path_is_found(path: str, source: str, table: list[mounts.Mount]) -> None:
    mount = mounts.mount_of(Path(path), table)

    assert mount is not None
    assert mount.source == source


@pytest.mark.parametrize(
    ("kind", "is_local"),
    [("ext4", True), ("xfs", True), ("tmpfs", True), ("nfs4", False), ("cifs", False), ("fuse.x", False), ("9p", False),
     ("virtiofs", False), ("ceph", False), ("of a later kernel", False)],
)  # fmt: skip
def test_network_file_system_is_not_local(monkeypatch: pytest.MonkeyPatch, kind: str, is_local: bool) -> None:
    table = mounts.parse(TABLE.replace(b"xfs", kind.replace(" ", r"\040").encode()))
    monkeypatch.setattr(mounts, "mounts", lambda: table)

    assert mounts.is_local(Path("/vol/data")) is is_local


def test_path_without_a_mount_is_not_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mount namespace whose root is not reachable, a path may have no mount."""
    monkeypatch.setattr(mounts, "mounts", list)

    assert not mounts.is_local(Path("/vol"))


def test_invalid_mount_lines_are_skipped() -> None:
    lines = (
        b"",
        b"27 1 254:0 / /",
        b"x y 0:1 / / rw - a b c",
        b"x 1 0:1 / / rw - a b c",
        b"27 y 0:1 / / rw - a b c",
        b"27 1 254:0 / / rw - ext4 x",
        b"\xff",
    )
    assert mounts.parse(b"\n".join(lines)) == []


def test_additional_mount_fields_are_ignored() -> None:
    (mount,) = mounts.parse(b"27 1 254:0 / / rw - ext4 /dev/vda rw,discard more")

    assert mount.features == {"rw", "discard"}


def test_mount_escape_is_decoded_to_a_single_byte() -> None:
    (mount,) = mounts.parse(rb"27 1 254:0 / /a\777 rw - ext4 /dev/vda rw")

    assert os.fsencode(mount.point) == b"/a\xff"


def test_mount_that_is_its_own_parent_is_the_root() -> None:
    """The kernel shows a container's first mount as its own parent."""
    table = mounts.parse(b"27 27 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:5 / /a rw - tmpfs a rw")

    assert [mounts.mount_of(Path(path), table) for path in ("/etc", "/a/b")] == table


@given(st.binary())
def test_parsing_a_mount_table_never_fails(garbage: bytes) -> None:
    mounts.parse(garbage)


@given(st.binary(min_size=1).filter(lambda name: name != b"." and not {0, ord("/")} & set(name)))
def test_mount_point_escapes_are_decoded(name: bytes) -> None:
    escaped = b"".join(rb"\%03o" % byte if byte in b" \t\n\\#" else bytes([byte]) for byte in name)

    (mount,) = mounts.parse(b"5 4 0:1 / /" + escaped + b" rw - tmpfs none rw\n")

    assert os.fsencode(mount.point) == b"/" + name


def test_mount_table_of_this_machine_contains_proc() -> None:
    mount = mounts.mount_of(Path("/proc/self/status"))

    assert mount is not None
    assert mount.kind == "proc"
    assert mounts.is_mount_point(Path("/proc"))
    assert not mounts.is_mount_point(Path("/proc/self"))


def test_only_a_visible_mount_at_the_exact_path_is_a_mount_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"5 4 0:1 / / rw - ext4 disk rw\n6 5 0:2 / {tmp_path}/ab rw - tmpfs none rw\n")
    monkeypatch.setattr(mounts, "MOUNTINFO", table)

    assert mounts.is_mount_point(tmp_path / "ab")
    assert not mounts.is_mount_point(tmp_path / "ab" / "file")
    assert not mounts.is_mount_point(tmp_path / "a")
    assert not mounts.is_mount_point(tmp_path)
    with table.open("a") as file:
        file.write("7 5 0:3 / /tmp rw - tmpfs none rw\n".replace("/tmp", str(tmp_path)))
    assert not mounts.is_mount_point(tmp_path / "ab")


def test_failed_unmount_error_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"^cannot unmount {tmp_path}: ") as failed:
        mounts.unmount(tmp_path)

    assert failed.value.errno
