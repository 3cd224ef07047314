"""Tests volumes that are bind-mounted or linked at a second path. The tests use a private mount namespace, so other
processes do not see the mounts.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import files, mounts, volumes
from tests.support.volumes import alone, drop_capabilities, holding, mount_ext4, mount_overlay, mount_tmpfs

pytestmark = pytest.mark.root

Maker = Callable[[Path], Path]


def tmpfs(scratch: Path) -> Path:
    return mount_tmpfs(scratch / "volume")


def ext4(scratch: Path) -> Path:
    return mount_ext4(scratch / "volume", scratch / "image")


def overlay(scratch: Path) -> Path:
    return mount_overlay(scratch / "volume", mount_tmpfs(scratch / "layers"))


def subpath(scratch: Path) -> Path:
    """Bind-mount a directory in a volume, as Kubernetes does for a subPath."""
    inside = mount_tmpfs(scratch / "whole") / "instance-0"
    inside.mkdir()
    (scratch / "volume").mkdir()
    mounts.bind(inside, scratch / "volume")
    return scratch / "volume"


def with_blanks(scratch: Path) -> Path:
    return mount_tmpfs(scratch / "a volume\twith\\all #kinds")


EVERY_VOLUME = pytest.mark.parametrize("make", [tmpfs, ext4, overlay, subpath, with_blanks])


@EVERY_VOLUME
@pytest.mark.parametrize("bind", [True, False])
@alone
def test_volume_is_mounted_or_linked_and_removed_again(tmp_path: Path, make: Maker, bind: bool) -> None:
    volume, place = make(tmp_path), tmp_path / "my store"
    (volume / "data").write_text("x")
    place.mkdir()

    volumes.show(volume, place, bind=bind)
    assert (place / "data").read_text() == "x"
    assert volumes.shows(place, volume)
    assert mounts.is_mount_point(place)
    assert place.is_symlink() is not bind

    volumes.take_away(place)
    assert not volumes.shows(place, volume)
    assert (volume / "data").read_text() == "x"
    assert mounts.is_mount_point(volume)


@alone
def test_bind_mount_probe_runs_in_a_private_namespace(tmp_path: Path) -> None:
    namespaces = [Path("/proc/self/ns/mnt").readlink()]
    try_bind = mounts.try_bind

    def watched(scratch: Path) -> None:
        namespaces.append(Path("/proc/thread-self/ns/mnt").readlink())
        try_bind(scratch)

    mounts.try_bind = watched

    assert volumes.can_bind(tmp_path)
    assert len(set(namespaces)) == 2
    assert Path("/proc/self/ns/mnt").readlink() == namespaces[0]
    assert list(tmp_path.iterdir()) == []


@alone
def test_root_without_capabilities_cannot_bind_mount(tmp_path: Path) -> None:
    drop_capabilities()

    assert os.geteuid() == 0
    assert not volumes.can_bind(tmp_path)


@alone
def test_image_directory_is_replaced_by_a_volume_link(tmp_path: Path) -> None:
    """On overlayfs, a directory in an image layer cannot be renamed (EXDEV), so it must be removed instead."""
    layers = mount_tmpfs(tmp_path / "layers")
    (layers / "lower/vcap/store").mkdir(parents=True)
    root = mount_overlay(tmp_path / "root", layers)
    volume = mount_tmpfs(tmp_path / "volume")
    place = root / "vcap/store"
    with pytest.raises(OSError, match="cross-device"):
        place.rename(root / "vcap/aside")

    volumes.show(volume, place, bind=False)

    assert place.readlink() == volume


@alone
def test_volume_link_through_an_inaccessible_directory_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volume, place = mount_tmpfs(tmp_path / "closed/volume"), tmp_path / "store"
    (tmp_path / "closed").chmod(0o700)

    volumes.show(volume, place, bind=False)

    assert f"cannot reach {place}: only root may pass {tmp_path / 'closed'}" in caplog.text


@alone
def test_unrelated_mount_is_not_replaced_by_a_volume_link(tmp_path: Path) -> None:
    volume, place = mount_tmpfs(tmp_path / "volume"), mount_tmpfs(tmp_path / "store")

    with pytest.raises(HostError, match="something else is mounted there"):
        volumes.show(volume, place, bind=False)
    assert mounts.is_mount_point(place)


@alone
def test_dangling_volume_link_is_replaced_by_a_bind_mount(tmp_path: Path) -> None:
    volume, place = mount_tmpfs(tmp_path / "volume"), tmp_path / "store"
    place.symlink_to(tmp_path / "gone")

    volumes.show(volume, place, bind=True)

    assert volumes.shows(place, volume)
    assert not place.is_symlink()


def options_of(place: Path) -> set[str]:
    mount = mounts.mount_of(place)
    assert mount is not None
    return set(mount.options)


@alone
def test_volume_mount_options_are_kept_and_extended(tmp_path: Path) -> None:
    volume, place = mount_tmpfs(tmp_path / "volume"), tmp_path / "store"
    subprocess.run(["mount", "-o", "remount,bind,nosuid,nodev", str(volume)], check=True)
    volumes.show(volume, place, bind=True)

    volumes.set_options(place, like=volume, more=["noatime", "data=writeback", "ro"])
    assert {"ro", "nosuid", "nodev", "noatime"} <= options_of(place)
    assert "rw" in options_of(volume)

    volumes.set_options(place, like=volume)
    assert options_of(place) == options_of(volume)


@alone
def test_matching_mount_options_are_not_set_again(tmp_path: Path) -> None:
    """If the options already match, no privilege to remount is needed."""
    volume, place = mount_tmpfs(tmp_path / "volume"), tmp_path / "store"
    volumes.show(volume, place, bind=True)
    drop_capabilities()

    volumes.set_options(place, like=volume)

    with pytest.raises(HostError, match="change the mount options of") as caught:
        volumes.set_options(place, like=volume, more=["ro"])
    assert caught.value.errno == errno.EPERM


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("cwd", "works in {store}"),
        ("open", "has {store}/file open"),
        ("deleted", "has {store}/file (deleted) open"),
        ("map", "has {store}/file mapped"),
    ],
)
@alone
def test_processes_that_keep_a_mount_busy_are_named(tmp_path: Path, how: str, text: str) -> None:
    volume, store = mount_tmpfs(tmp_path / "volume"), tmp_path / "the store"
    (volume / "file").write_text("x")
    volumes.show(volume, store, bind=True)
    assert volumes.holders([store, volume]) == []

    with holding(store, how) as program:
        with pytest.raises(HostError) as caught:
            volumes.take_away(store)
        found = volumes.holders([store, volume])

    assert caught.value.errno == errno.EBUSY
    assert [holder.pid for holder in found] == [program.pid]
    assert str(found[0]).startswith(f"pid {program.pid} ({sys.executable} -c import ctypes, os, sys ")
    assert str(found[0]).endswith(") " + text.format(store=store))


@alone
def test_mount_holders_do_not_include_the_agent_itself(tmp_path: Path) -> None:
    """While the agent copies a volume's files, it has them open itself."""
    volume = mount_tmpfs(tmp_path / "volume")
    with (volume / "file").open("w"):
        assert volumes.holders([volume]) == []


@alone
def test_mount_holders_exclude_processes_that_use_the_same_path_on_another_device(tmp_path: Path) -> None:
    """In the host's PID namespace, the agent sees other pods' processes that use the same path for another disk."""
    volume, store = mount_tmpfs(tmp_path / "volume"), tmp_path / "store"
    other = mount_tmpfs(tmp_path / "other")
    (other / "file").write_text("x")
    store.mkdir()
    pod = ["unshare", "-m", "sh", "-c", f'mount --bind {other} {store} && exec "$@"', "sh"]

    with holding(store, within=pod):
        volumes.show(volume, store, bind=True)
        found = volumes.holders([store, volume])

    assert found == []


@alone
def test_loop_device_that_keeps_a_mount_busy_is_named(tmp_path: Path) -> None:
    volume = mount_tmpfs(tmp_path / "volume")
    image = volume / "image"
    image.write_bytes(bytes(1 << 20))
    made = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip("no loop device")
    device = made.stdout.strip()
    try:
        found = [str(holder) for holder in volumes.holders([volume])]
    finally:
        subprocess.run(["losetup", "-d", device], check=True)

    assert found == [f"loop device {Path(device).name} shows {image}"]


def test_loop_device_with_an_undecodable_name_is_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop device's backing file can have a name that is not valid UTF-8, and every container sees all loop devices
    of its node.
    """
    shown = tmp_path / "block/loop0/loop/backing_file"
    shown.parent.mkdir(parents=True)
    shown.write_bytes(os.fsencode(tmp_path / "volume") + b"/\xff\n")
    monkeypatch.setattr(volumes, "BLOCK_DEVICES", tmp_path / "block")

    found = volumes.holders([tmp_path / "volume"])

    assert [os.fsencode(str(holder)) for holder in found] == [b"loop device loop0 shows " + shown.read_bytes().strip()]


@alone
def test_deep_directory_tree_in_an_image_layer_is_removed(tmp_path: Path) -> None:
    """On overlayfs, a tree from an image layer cannot be renamed before it is removed (EXDEV), so it must be removed in
    place. A job can nest thousands of directories in the tree.
    """
    layers = mount_tmpfs(tmp_path / "layers")
    (layers / "lower/jobs/web/bin").mkdir(parents=True)
    (layers / "lower/jobs/web/bin/ctl").touch()
    root = mount_overlay(tmp_path / "root", layers)
    deepest = os.open(root / "jobs/web/bin", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=deepest)
        deepest, above = os.open("d", os.O_RDONLY, dir_fd=deepest), deepest
        os.close(above)
    os.close(deepest)

    files.remove_tree(root / "jobs")

    assert list(root.iterdir()) == []
