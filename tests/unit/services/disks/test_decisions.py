"""Tests the decisions about disks: where each disk belongs, and which steps a request needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_shim.core.errors import ActionError
from agent_shim.services.disks import decisions
from agent_shim.services.disks.decisions import (
    Disk,
    Mark,
    MountPoint,
    Placement,
    ReleaseVolume,
    Show,
    TakeAway,
    Unclaim,
    View,
    plan,
    steps_to_mount,
    steps_to_restore,
    steps_to_swap,
    steps_to_unmount,
)
from agent_shim.services.disks.markers import Marker

# --- disk locations ---------------------------------------------------------------------------------------------------

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
        ([], "", "", Placement()),
        ([], "a", "", Placement()),
        ([marked("a", "store")], "", "", Placement("a")),
        ([marked("a", "store"), unmarked("b")], "", "", Placement("a")),
        ([marked("a", "store"), unmarked("b")], "b", "", Placement("a")),
        ([marked("a", "store"), marked("b", "target")], "", "", Placement("a", "b")),
        ([marked("a", "store"), marked("b", "target", "a")], "", "b", Placement("a", "b")),
        ([marked("a", "store"), marked("b", "store", "a")], "a", "a", Placement("b", replaced=frozenset("a"))),
        ([marked("a", ""), marked("b", "store", "a")], "a", "", Placement("b")),
        (
            [marked("a", "store", "b", generation=2), marked("b", "store", "a")],
            "b",
            "b",
            Placement("a", replaced=frozenset("b")),
        ),
        ([marked("a", "store"), marked("b", "store")], "", "", Placement(problem=BOTH)),
        ([marked("a", "store"), marked("b", "store")], "b", "a", Placement("b")),
        ([marked("a", "store"), marked("b", "store")], "", "a", Placement("a")),
        ([marked("b", "target")], "", "", Placement("", "b")),
        ([marked("a", "")], "", "", Placement()),
        ([marked("a", "")], "a", "", Placement(problem=UNMOUNTED)),
        ([marked("a", "target")], "a", "", Placement("", "a", problem=UNMOUNTED.replace("unmounted", "target"))),
        ([marked("a", "store", says="b")], "a", "", Placement(problem=RENAMED)),
        ([marked("a", "store", says="b"), marked("c", "store")], "a", "", Placement(problem=RENAMED)),
        ([unmarked("a")], "", "", Placement()),
        ([unmarked("a")], "a", "", Placement("a")),
        ([unmarked("a"), unmarked("b")], "b", "a", Placement("a")),
        ([unmarked("a"), unmarked("b")], "", "", Placement()),
        ([marked("a", "store", says="b")], "", "", Placement()),
        ([absent("a")], "", "", Placement()),
        ([absent("a")], "a", "", Placement(problem=GONE)),
        ([absent("a"), marked("b", "store")], "a", "", Placement(problem=GONE)),
        ([absent("a"), marked("b", "store", "a")], "a", "", Placement("b", replaced=frozenset())),
        ([marked("a", "store", instance="i-1")], "", "", Placement("a")),
        ([marked("a", "store", instance="i-2")], "", "", Placement(problem=STRANGE)),
        ([marked("a", "target", instance="i-2"), marked("b", "store")], "", "", Placement("b")),
        ([marked("a", "", instance="i-2")], "", "", Placement()),
        ([marked("a", "store", instance="i-2"), marked("b", "store", instance="i-1")], "", "", Placement("b")),
    ],
)
def test_disk_markers_determine_the_mount_points(
    disks: list[Disk], managed: str, on_store: str, decided: Placement
) -> None:
    assert plan(disks, on_store=on_store, managed=managed, instance="i-1") == decided


def test_disk_is_used_before_the_instance_id_is_known() -> None:
    """Until the first apply, the agent has no instance id to compare with the marker."""
    assert plan([marked("a", "store", instance="i-2")], on_store="", managed="", instance="") == Placement("a")


# --- steps ------------------------------------------------------------------------------------------------------------

RECORDED = [json.loads(line) for line in Path(__file__).with_name("decisions.jsonl").read_text().splitlines()]
"""Requests, views of the disks, and the resulting steps, recorded in the disk tests on 2026-11-28 with the
implementation that preceded these functions.

Only one of several similar cases is kept. Members with their default value are left out.
"""


def converted(document: Any, kind: type[Any]) -> Any:
    return msgspec.convert(document, kind, dec_hook=lambda wanted, text: wanted(text))


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: "-".join(case["request"]))
def test_disk_requests_produce_the_steps_recorded_in_decisions_jsonl(case: dict[str, Any]) -> None:
    name, *cids = case["request"]
    view = converted(case["view"], View)
    if "refused" in case:
        with pytest.raises(ActionError, match=f"^{re.escape(case['refused'])}$"):
            getattr(decisions, f"steps_to_{name}")(view, *cids)
        return

    steps = [converted(members, getattr(decisions, kind)) for kind, members in case["steps"]]
    assert getattr(decisions, f"steps_to_{name}")(view, *cids) == steps


STORE, TARGET = MountPoint(HERE / "store"), MountPoint(HERE / "target")


def test_mounting_an_unreadable_volume_fails() -> None:
    """The agent cannot tell whether the volume is new. If it were new, the previous disk would have to be mounted
    first.
    """
    view = View(STORE, TARGET, {"a": msgspec.structs.replace(unmarked("a"), is_empty=None)})

    with pytest.raises(ActionError, match="^cannot read the volume of disk a at /volumes/a$"):
        steps_to_mount(view, "a")


def test_mounted_disk_without_a_hint_is_not_replaced_by_the_previous_disk() -> None:
    """The mounted disk no longer has a hint, so only the marker on its mount identifies it. The previous disk has no
    marker.
    """
    store = msgspec.structs.replace(STORE, marker=Marker("gone", "store"), is_mount=True)
    view = View(store, TARGET, {"a": unmarked("a")}, managed="a")

    assert steps_to_restore(view) == []


@pytest.mark.parametrize("is_unmounted", [False, True])
def test_mounting_an_empty_disk_restores_only_a_previous_disk_that_was_not_unmounted(is_unmounted: bool) -> None:
    old = msgspec.structs.replace(unmarked("a"), is_empty=False)
    view = View(STORE, TARGET, {"a": old, "b": unmarked("b")}, unmounted=frozenset("a" * is_unmounted))

    shown = {step.volume.name: step.place for step in steps_to_mount(view, "b") if isinstance(step, Show)}
    assert shown == ({"b": STORE.path} if is_unmounted else {"a": STORE.path, "b": TARGET.path})


def test_disk_steps_do_not_acquire_a_lease_that_the_agent_already_holds() -> None:
    """If the agent planned to acquire a lease that it already holds, it would plan this step again and again."""
    store = msgspec.structs.replace(STORE, shown={"a": True}, is_mount=True)
    view = View(store, TARGET, {"a": msgspec.structs.replace(marked("a", "store"), is_held=True)}, managed="a")

    assert steps_to_restore(view) == steps_to_mount(view, "a") == []


@pytest.mark.parametrize("is_volume_missing", [True, False])
def test_unmount_of_a_disk_without_a_marker_is_recorded_on_the_root_file_system(is_volume_missing: bool) -> None:
    """Without the record, the disk would be treated as mounted if the runtime's mount stays in place, or if the missing
    volume returns with its old marker.
    """
    store = msgspec.structs.replace(STORE, shown={"a": True}, is_mount=True)
    view = View(store, TARGET, {"a": absent("a") if is_volume_missing else unmarked("a")}, managed="a")

    assert Unclaim("a", is_managed=True) in steps_to_unmount(view, "a")


def test_recorded_unmount_overrides_the_mount_of_the_container_runtime() -> None:
    """The runtime's mount stays in place, and there is no marker on the volume to show that the disk was unmounted."""
    store = msgspec.structs.replace(STORE, shown={"a": True}, is_mount=True)
    view = View(store, TARGET, {"a": unmarked("a")})

    assert view.on_store == "a"
    assert msgspec.structs.replace(view, unmounted=frozenset("a")).on_store == ""


def migrating(old: Disk, *, binds: bool = True) -> View:
    store = msgspec.structs.replace(STORE, shown={"a": True}, is_mount=binds, is_link=not binds)
    target = msgspec.structs.replace(TARGET, shown={"b": True}, is_mount=True)
    return View(store, target, {"a": old, "b": marked("b", "target", "a")}, managed="a", binds=binds)


def test_disk_swap_marks_the_new_disk_before_it_unmarks_the_old_disk() -> None:
    """If the agent is killed after the first step, both disks are marked as the store. The marker with the higher
    generation then identifies the copy.
    """
    steps = steps_to_swap(migrating(marked("a", "store", "b", generation=3)), "a", "b")

    assert steps == [
        TakeAway(HERE / "store"),
        Show(HERE / "b", HERE / "store"),
        Mark(HERE / "b", Marker("b", "store", "a", 4, "")),
        Unclaim("a", HERE / "a", Marker("a", "", "", 3, "")),
        ReleaseVolume(HERE / "a"),
        TakeAway(HERE / "target"),
    ]


@pytest.mark.parametrize("why", ["the volume itself is mounted there", "the container may not mount"])
def test_disk_swap_does_not_unmount_a_store_that_is_a_symlink_or_mounted_by_the_manifest(why: str) -> None:
    """If the pod manifest mounts the store, the new disk is mounted over it. A symlink is replaced atomically."""
    old = marked("a", "store")
    if why == "the volume itself is mounted there":
        old = msgspec.structs.replace(old, volume=HERE / "store")

    steps = steps_to_swap(migrating(old, binds=why != "the container may not mount"), "a", "b")

    assert TakeAway(HERE / "store") not in steps
