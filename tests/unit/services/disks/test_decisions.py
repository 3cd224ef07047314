"""Where disks belong, and the steps that requests need."""

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
    Plan,
    Release,
    Show,
    TakeAway,
    Unclaim,
    View,
    mount,
    plan,
    restore,
    swap,
    unmount,
)
from agent_shim.services.disks.markers import Marker

# --- where disks belong ---------------------------------------------------------------------------------------------

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


# --- steps ----------------------------------------------------------------------------------------------------------

RECORDED = [json.loads(line) for line in Path(__file__).with_name("decisions.jsonl").read_text().splitlines()]
"""What requests saw, and the steps that followed, in the tests of disks on 2026-11-28, before these functions existed.

One case of each kind is kept. Members that have their default are left out.
"""


def converted(document: Any, kind: type[Any]) -> Any:
    return msgspec.convert(document, kind, dec_hook=lambda wanted, text: wanted(text))


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: "-".join(case["request"]))
def test_request_gets_its_recorded_steps(case: dict[str, Any]) -> None:
    name, *cids = case["request"]
    view = converted(case["view"], View)
    if "refused" in case:
        with pytest.raises(ActionError, match=f"^{re.escape(case['refused'])}$"):
            getattr(decisions, name)(view, *cids)
        return

    steps = [converted(members, getattr(decisions, kind)) for kind, members in case["steps"]]
    assert getattr(decisions, name)(view, *cids) == steps


STORE, TARGET = MountPoint(HERE / "store"), MountPoint(HERE / "target")


def test_mount_of_an_unreadable_volume_is_refused() -> None:
    """It could be a new one, before which the former disk has to be mounted."""
    view = View(STORE, TARGET, {"a": msgspec.structs.replace(unmarked("a"), is_empty=None)})

    with pytest.raises(ActionError, match="^cannot read the volume of disk a at /volumes/a$"):
        mount(view, "a")


def test_disk_that_only_its_mount_names_makes_way_for_nothing() -> None:
    """Its hint was removed, and the former disk has no marker."""
    store = msgspec.structs.replace(STORE, marker=Marker("gone", "store"), is_mount=True)
    view = View(store, TARGET, {"a": unmarked("a")}, managed="a")

    assert restore(view) == []


def test_held_lease_is_not_taken_again() -> None:
    """A look after nothing but leases would find the same."""
    store = msgspec.structs.replace(STORE, shown={"a": True}, is_mount=True)
    view = View(store, TARGET, {"a": msgspec.structs.replace(marked("a", "store"), is_held=True)}, managed="a")

    assert restore(view) == mount(view, "a") == []


@pytest.mark.parametrize("is_volume_missing", [True, False])
def test_unmount_without_a_marker_is_recorded_elsewhere(is_volume_missing: bool) -> None:
    """A mount of the runtime may stay there, and a missing volume may come back with a marker for the store."""
    store = msgspec.structs.replace(STORE, shown={"a": True}, is_mount=True)
    view = View(store, TARGET, {"a": absent("a") if is_volume_missing else unmarked("a")}, managed="a")

    assert Unclaim("a", is_managed=True) in unmount(view, "a")


def test_recorded_unmount_outweighs_a_mount_that_stays() -> None:
    """The runtime made it, and the volume has no marker that could say so."""
    store = msgspec.structs.replace(STORE, shown={"a": True}, is_mount=True)
    view = View(store, TARGET, {"a": unmarked("a")})

    assert view.on_store == "a"
    assert msgspec.structs.replace(view, unmounted=frozenset("a")).on_store == ""


def migrating(old: Disk, *, binds: bool = True) -> View:
    store = msgspec.structs.replace(STORE, shown={"a": True}, is_mount=binds, is_link=not binds)
    target = msgspec.structs.replace(TARGET, shown={"b": True}, is_mount=True)
    return View(store, target, {"a": old, "b": marked("b", "target", "a")}, managed="a", binds=binds)


def test_swap_marks_the_copy_before_its_source() -> None:
    """Killed in between, both claim the store, and the generation tells that the copy is the later one."""
    steps = swap(migrating(marked("a", "store", "b", generation=3)), "a", "b")

    assert steps == [
        TakeAway(HERE / "store"),
        Show(HERE / "b", HERE / "store"),
        Mark(HERE / "b", Marker("b", "store", "a", 4, "")),
        Unclaim("a", HERE / "a", Marker("a", "", "", 3, "")),
        Release(HERE / "a"),
        TakeAway(HERE / "target"),
    ]


@pytest.mark.parametrize("why", ["the volume itself is mounted there", "the container may not mount"])
def test_swap_takes_nothing_away_from_the_store(why: str) -> None:
    """A mount of the manifest stays below the new one, and a link is replaced atomically."""
    old = marked("a", "store")
    if why == "the volume itself is mounted there":
        old = msgspec.structs.replace(old, volume=HERE / "store")

    steps = swap(migrating(old, binds=why != "the container may not mount"), "a", "b")

    assert TakeAway(HERE / "store") not in steps
