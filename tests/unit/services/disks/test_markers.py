"""Markers on volumes, and where the disks that they name belong."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agent_shim.core.errors import HostError
from agent_shim.services.disks import markers
from agent_shim.services.disks.markers import Disk, Marker, Plan, plan

# --- markers --------------------------------------------------------------------------------------------------------


def test_disk_marker_is_read_back_unchanged(tmp_path: Path) -> None:
    marker = Marker("disk-a", "store", source="disk-0", instance="i-1")

    markers.write(tmp_path, marker)

    assert markers.read(tmp_path) == marker
    assert (tmp_path / ".agent_shim/disk.json").read_text() == (
        '{"cid":"disk-a","role":"store","source":"disk-0","generation":0,"instance":"i-1","version":1}'
    )


def test_disk_marker_is_readable_only_by_root(tmp_path: Path) -> None:
    markers.write(tmp_path, Marker("a"))

    assert stat.S_IMODE((tmp_path / ".agent_shim").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / ".agent_shim/disk.json").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / ".agent_shim").iterdir()] == ["disk.json"]


def test_disk_marker_of_a_later_version_is_understood(tmp_path: Path) -> None:
    (tmp_path / ".agent_shim").mkdir()
    (tmp_path / ".agent_shim/disk.json").write_text('{"cid":"a","role":"store","version":2,"colour":"blue"}')

    assert markers.read(tmp_path) == Marker("a", "store", version=2)


def test_unusable_disk_marker_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / ".agent_shim/disk.json"
    path.parent.mkdir()
    for content in ("", "{", "[]", '{"cid": 7}', '{"cid": "a", "role": "king"}', '{"role": "store"}'):
        path.write_text(content)

        assert markers.read(tmp_path) is None


@pytest.mark.attack("a job replaces the marker or the lease on its disk with a link or a FIFO")
def test_links_and_pipes_at_a_disk_marker_are_not_followed_or_opened(tmp_path: Path) -> None:
    volume, elsewhere = tmp_path / "volume", tmp_path / "elsewhere"
    volume.mkdir()
    elsewhere.mkdir()
    markers.write(elsewhere, Marker("a", "store"))

    (volume / ".agent_shim").symlink_to(elsewhere / ".agent_shim")
    assert markers.read(volume) is None
    with pytest.raises(HostError, match="cannot mark the volume"):
        markers.write(volume, Marker("b"))

    (volume / ".agent_shim").unlink()
    (volume / ".agent_shim").mkdir()
    (volume / ".agent_shim/disk.json").symlink_to(elsewhere / ".agent_shim/disk.json")
    assert markers.read(volume) is None
    markers.write(volume, Marker("b"))
    assert markers.read(elsewhere) == Marker("a", "store")

    (volume / ".agent_shim/disk.json").unlink()
    os.mkfifo(volume / ".agent_shim/disk.json")
    assert markers.read(volume) is None


@pytest.mark.root
@pytest.mark.parametrize("forged", ["the directory", "the file"])
def test_disk_marker_owned_by_a_job_counts_as_missing_and_is_set_aside(tmp_path: Path, forged: str) -> None:
    """Many releases change the owner of a disk's top directory to vcap."""
    os.chown(tmp_path, 1000, 1000)
    markers.write(tmp_path, Marker("another", "store"))
    path = tmp_path / ".agent_shim"
    os.chown(path if forged == "the directory" else path / "disk.json", 1000, 1000)

    assert markers.read(tmp_path) is None

    markers.write(tmp_path, Marker("a", "store"))
    assert markers.read(tmp_path) == Marker("a", "store")


def test_missing_volume_has_no_disk_marker(tmp_path: Path) -> None:
    assert markers.read(tmp_path / "gone") is None


# --- the decision ---------------------------------------------------------------------------------------------------

HERE = Path("/volumes")


def marked(
    cid: str, role: str, source: str = "", instance: str = "", *, says: str = "", generation: int | None = None
) -> Disk:
    number = int(bool(source)) if generation is None else generation
    marker = Marker(says or cid, role, source, number, instance)  # type: ignore[arg-type]
    return Disk(cid, HERE / cid, HERE / cid, marker)


def unmarked(cid: str) -> Disk:
    return Disk(cid, HERE / cid, HERE / cid)


def absent(cid: str) -> Disk:
    return Disk(cid, HERE / cid)


BOTH = "the disks a and b both claim the store"
GONE = "disk a was mounted and is not there: no volume at /volumes/a"
UNMOUNTED = "disk a was mounted last, but its marker says unmounted (mount_disk a mounts it again)"
RENAMED = "disk a was mounted and its volume at /volumes/a is marked as disk b"
STRANGE = "disk a belongs to another instance and the Director has not had it mounted here"


@pytest.mark.parametrize(
    ("disks", "managed", "on_store", "decided"),
    [
        ([], "", "", Plan()),
        ([], "a", "", Plan()),
        ([marked("a", "store")], "", "", Plan("a")),
        ([marked("a", "store"), unmarked("b")], "", "", Plan("a")),
        ([marked("a", "store"), unmarked("b")], "b", "", Plan("a")),
        ([marked("a", "store"), marked("b", "target")], "", "", Plan("a", "b")),
        ([marked("a", "store"), marked("b", "target", "a")], "", "b", Plan("a", "b")),
        ([marked("a", "store"), marked("b", "store", "a")], "a", "a", Plan("b", replaced=frozenset("a"))),
        ([marked("a", ""), marked("b", "store", "a")], "a", "", Plan("b")),
        (
            [marked("a", "store", "b", generation=2), marked("b", "store", "a")],
            "b",
            "b",
            Plan("a", replaced=frozenset("b")),
        ),
        ([marked("a", "store"), marked("b", "store")], "", "", Plan(problem=BOTH)),
        ([marked("a", "store"), marked("b", "store")], "b", "a", Plan("b")),
        ([marked("a", "store"), marked("b", "store")], "", "a", Plan("a")),
        ([marked("b", "target")], "", "", Plan("", "b")),
        ([marked("a", "")], "", "", Plan()),
        ([marked("a", "")], "a", "", Plan(problem=UNMOUNTED)),
        ([marked("a", "target")], "a", "", Plan("", "a", problem=UNMOUNTED.replace("unmounted", "target"))),
        ([marked("a", "store", says="b")], "a", "", Plan(problem=RENAMED)),
        ([marked("a", "store", says="b"), marked("c", "store")], "a", "", Plan(problem=RENAMED)),
        ([unmarked("a")], "", "", Plan()),
        ([unmarked("a")], "a", "", Plan("a")),
        ([unmarked("a"), unmarked("b")], "b", "a", Plan("a")),
        ([unmarked("a"), unmarked("b")], "", "", Plan()),
        ([marked("a", "store", says="b")], "", "", Plan()),
        ([absent("a")], "", "", Plan()),
        ([absent("a")], "a", "", Plan(problem=GONE)),
        ([absent("a"), marked("b", "store")], "a", "", Plan(problem=GONE)),
        ([absent("a"), marked("b", "store", "a")], "a", "", Plan("b", replaced=frozenset())),
        ([marked("a", "store", instance="i-1")], "", "", Plan("a")),
        ([marked("a", "store", instance="i-2")], "", "", Plan(problem=STRANGE)),
        ([marked("a", "target", instance="i-2"), marked("b", "store")], "", "", Plan("b")),
        ([marked("a", "", instance="i-2")], "", "", Plan()),
        ([marked("a", "store", instance="i-2"), marked("b", "store", instance="i-1")], "", "", Plan("b")),
    ],
)
def test_mount_point_of_a_disk_follows_from_its_marker(
    disks: list[Disk], managed: str, on_store: str, decided: Plan
) -> None:
    assert plan(disks, on_store=on_store, managed=managed, instance="i-1") == decided


def test_machine_without_an_instance_id_uses_any_disk() -> None:
    """Between the first boot and the first apply, the Director has not sent an id yet."""
    assert plan([marked("a", "store", instance="i-2")], on_store="", managed="", instance="") == Plan("a")
