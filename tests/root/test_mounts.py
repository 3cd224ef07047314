"""Tests mounts and unmounts on a test machine."""

from __future__ import annotations

import pytest

from tests.root.conftest import UNPRIVILEGED, Inside
from tests.support.machine import Machine

pytestmark = pytest.mark.root

PLACES = """
from agent_shim.host import mounts
here = Path("/var/vcap/m")
source, target = here / "a b", here / "target"
for place in (source, target):
    place.mkdir(parents=True, exist_ok=True)
(source / "file").write_text("content")
"""


def test_bind_mount_shows_its_source_until_unmounted(inside: Inside) -> None:
    seen = inside(f"""{PLACES}
mounts.bind(source, target)
during = [(target / "file").read_text(), mounts.is_mount_point(target), mounts.mount_of(target / "file").root]
mounts.set_flags(target, mounts.MS_RDONLY)
try:
    (target / "new").write_text("")
    refused = ""
except OSError as exc:
    refused = exc.strerror
(source / "old").write_text("")
during += [refused, "ro" in mounts.mount_of(target).options]
mounts.unmount(target)
return [*during, (target / "file").exists(), mounts.is_mount_point(target)]
""")

    assert seen == ["content", True, "/m/a b", "Read-only file system", True, False, False]


def test_stacked_mounts_are_unmounted_one_by_one(inside: Inside) -> None:
    seen = inside(f"""{PLACES}
mounts.bind(source, target)
mounts.mount_tmpfs(target, "size=64k,mode=700")
kinds = [mounts.mount_of(target).source, (target / "file").exists()]
mounts.unmount(target)
kinds.append((target / "file").exists())
mounts.unmount(target)
return [*kinds, mounts.is_mount_point(target)]
""")

    assert seen == ["tmpfs", False, True, False]


def test_busy_mount_can_only_be_unmounted_lazily(inside: Inside) -> None:
    seen = inside(f"""{PLACES}
mounts.bind(source, target)
with (target / "file").open():
    try:
        mounts.unmount(target)
        refused = ""
    except HostError as exc:
        refused = str(exc)
    mounts.unmount(target, lazy=True)
return [refused, mounts.is_mount_point(target)]
""")

    assert seen == ["cannot unmount /var/vcap/m/target: Device or resource busy", False]


def test_missing_source_of_a_bind_mount_is_an_error(inside: Inside) -> None:
    error = inside(f"{PLACES}\nmounts.bind(here / 'none', target)")

    assert error == "cannot bind /var/vcap/m/none on /var/vcap/m/target: No such file or directory"


def test_mounts_in_a_private_namespace_are_invisible_to_other_processes(box: Machine, inside: Inside) -> None:
    inside(f"{PLACES}\nmounts.leave_mount_namespace()\nmounts.bind(source, target)\nassert (target / 'file').exists()")

    assert not (box.vcap / "m/target/file").exists()


def test_bind_mount_probe_detects_missing_permission_and_leaves_no_trace(box: Machine, inside: Inside) -> None:
    box.run("mkdir -p -m 777 /var/vcap/probe")
    ask = "from agent_shim.host import volumes\nreturn volumes.can_bind(Path('/var/vcap/probe'))"
    without = ("setpriv", "--bounding-set", "-sys_admin")

    assert inside(ask) is True
    assert inside(ask, *without) is False
    assert inside(ask, *UNPRIVILEGED) is False
    assert list((box.vcap / "probe").iterdir()) == []
    assert "probe" not in box.run("cat /proc/self/mountinfo")
    why = inside("from agent_shim.host import mounts\nmounts.try_bind(Path('/var/vcap/probe'))", *without)
    assert why.startswith("cannot bind /var/vcap/probe/bind-")
    assert why.endswith(": Operation not permitted")
