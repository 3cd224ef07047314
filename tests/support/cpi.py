"""Describes how each CPI sets up its containers: where it writes the settings, where it mounts disks, and how it
attaches them.

Names, paths and modes are those of the real CPIs, with one exception: directories that a CPI creates in the root
directory are below ``/mnt`` here, because a test machine's root directory is read-only.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kubernetes_cpi import manifests
from tests.support.machine import Machine
from tests.support.source import ROOT

BOSH: Final = "/var/vcap/bosh"
WARDEN: Final = f"{BOSH}/warden-cpi-agent-env.json"

Document = dict[str, Any]
Deliver = Callable[[Machine, str, Document], None]


def put(machine: Machine, path: str, document: Document) -> None:
    """Write the settings file with mode 0640 into the container's root file system."""
    machine.write(path, document, mode=0o640)


def put_for_all(machine: Machine, path: str, document: Document) -> None:
    """Write the settings file with mode 0644, as LXD's file push does."""
    machine.write(path, document, mode=0o644)


def unpack(machine: Machine, path: str, document: Document) -> None:
    """Write the settings file as the Docker CPI does, by unpacking an archive in the running container.

    For a moment, the file exists with incomplete content.
    """
    raw = json.dumps(document).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo(path.lstrip("/"))
        member.mode, member.size = 0o640, len(raw)
        archive.addfile(member, io.BytesIO(raw))
    content = packed.getvalue()
    half = 512 + len(raw) // 2
    with machine.popen(["tar", "-x", "-C", "/"], stdin=subprocess.PIPE) as unpacking:
        assert unpacking.stdin is not None
        for part in (content[:half], content[half:]):
            unpacking.stdin.write(part)
            unpacking.stdin.flush()
    assert unpacking.returncode == 0


def mount_file(machine: Machine, path: str, document: Document) -> None:
    """Mount a single read-only file, as Kubernetes does for a ConfigMap key with ``subPath``."""
    machine.write("/mnt/config", document, mode=0o644)
    place = shlex.quote(path)
    machine.run(f"touch {place}; mount --bind /mnt/config {place}; mount -o remount,bind,ro {place}")


def mount_secret(machine: Machine, path: str, document: Document) -> None:
    """Mount a Secret as Kubernetes does: a directory of symlinks into a directory that the kubelet replaces
    as a whole.
    """
    place = Path(path)
    machine.write(f"/mnt/secret/..2026/{place.name}", document, mode=0o644)
    machine.run(
        f"cd /mnt/secret; ln -s ..2026 ..data; ln -s ..data/{place.name} {place.name}; "
        f"mkdir -p {place.parent}; mount --bind /mnt/secret {place.parent}; mount -o remount,bind,ro {place.parent}"
    )


@dataclass(frozen=True)
class CpiTraits:
    """How one CPI sets up its containers.

    ``place`` is the path of a disk in the container. ``sources`` are the settings sources in the agent.json of the
    CPI's stemcell. ``attaches`` says what happens to the container when a disk is attached or detached. ``members`` are
    settings members that only this CPI writes. ``start`` is a shell command that runs before the agent starts, and
    ``saves`` are the files that the CPI copies from one container to the next.
    """

    name: str = "a plain one"
    settings: str = WARDEN
    sources: tuple[str, ...] = (WARDEN,)
    deliver: Deliver = put
    is_late: bool = False
    place: str = f"{BOSH}/disks/{{cid}}"
    is_hint_an_object: bool = False
    tells_the_agent: bool = True
    """True if the CPI implements API version 2. The Director then sends disk hints with ``add_persistent_disk``."""
    names_disks_to_migrate: bool = True
    attaches: Literal["live", "by restart", "by recreation"] = "by recreation"
    loses_data_unasked: bool = True
    """Whether an unplanned restart, for example after a node failure, empties the container's data volume."""
    members: Document = field(default_factory=dict)
    start: str = ""
    saves: tuple[str, ...] = ()
    finish: str = ""
    """A shell command that the CPI runs last, while the agent is already running."""

    def disk(self, cid: str) -> str:
        """Return the path of a disk in the container."""
        return self.place.format(cid=cid)

    def hint(self, cid: str) -> Any:
        """Return the disk hint, in the form that the settings and ``add_persistent_disk`` use."""
        return {"path": self.disk(cid)} if self.is_hint_an_object else self.disk(cid)

    def __str__(self) -> str:
        return self.name


RUN_DIRECTORIES: Final = "rm -rf /var/vcap/data/sys; mkdir -p /var/vcap/data/sys /var/vcap/store"

DOCKER: Final = CpiTraits(
    name="Docker",
    deliver=unpack,
    is_late=True,
    place="/mnt/warden-cpi-dev/{cid}",
    members={"disks": {"system": "", "ephemeral": None}},
    start=RUN_DIRECTORIES,
    saves=(f"{BOSH}/update_settings.json", "/var/vcap/instance/dns/records.json"),
)
CREATE_ENV: Final = CpiTraits(
    name="Docker with create-env",
    deliver=unpack,
    is_late=True,
    place="/mnt/warden-cpi-dev/{cid}",
    names_disks_to_migrate=False,
    start=RUN_DIRECTORIES,
)
GARDEN: Final = CpiTraits(
    name="warden", place="/mnt/warden-cpi-dev/{cid}", attaches="live", loses_data_unasked=False, start=RUN_DIRECTORIES
)
WARDEN_WITH_SYSTEMD: Final = CpiTraits(
    name="warden with start_containers_with_systemd",
    is_late=True,
    place="/mnt/warden-cpi-dev/{cid}",
    attaches="live",
    loses_data_unasked=False,
    start=(
        f"cat {shlex.quote(str(ROOT / 'stemcell_overlay/blank/etc/hosts'))} >/etc/hosts; "
        "echo 10.254.0.2 $(hostname) >/mnt/hosts; mount --bind /mnt/hosts /etc/hosts"
    ),
    finish="umount /etc/hosts || true",
)
"""bosh-lite's variant. PID 1 is the image's own systemd, the settings are streamed in after systemd has started, and
Garden's bind mount at ``/etc/hosts`` is removed only when the agent is already running.
"""
LXD: Final = CpiTraits(
    name="LXD",
    deliver=put_for_all,
    place="/mnt/warden-cpi-dev/{cid}",
    is_hint_an_object=True,
    tells_the_agent=False,
    attaches="by restart",
    loses_data_unasked=False,
    members={"disks": {"ephemeral": {"path": "/var/vcap/data"}}},
)
KUBERNETES: Final = CpiTraits(
    name="bosh-kubernetes-cpi",
    deliver=mount_file,
    place="/mnt/{cid}",
    tells_the_agent=False,
    start=f"{RUN_DIRECTORIES}; mkdir -p {BOSH}/bin; echo '#!/bin/true' >{BOSH}/bin/ntpdate",
)
SYKESM: Final = CpiTraits(
    name="kubernetes-cpi",
    settings=f"{BOSH}/instance_settings.json",
    sources=(f"{BOSH}/instance_settings.json",),
    deliver=mount_file,
    place="/mnt/{cid}",
    tells_the_agent=False,
    loses_data_unasked=False,
    members={"blobstore": {"provider": "local", "options": {"blobstore_path": "/var/vcap/blobs"}}},
)
SAP: Final = CpiTraits(
    name="SAP's kubernetes CPI",
    settings=f"{BOSH}/settings-source-file/config.json",
    sources=(WARDEN, f"{BOSH}/settings-source-file/config.json"),
    deliver=mount_secret,
    tells_the_agent=False,
)
"""This CPI can attach only one disk, because it gives all volumes the same name."""
OURS: Final = CpiTraits(
    name="our Kubernetes CPI",
    settings=f"{BOSH}/settings-source-file/config.json",
    sources=(WARDEN, f"{BOSH}/settings-source-file/config.json"),
    deliver=mount_secret,
    place=f"{manifests.DISKS_AT_CREATION}/{{cid}}",
    is_hint_an_object=True,
)
"""Our Kubernetes CPI when it attaches disks as it creates the VM. A disk that existed before the VM and one that is
reserved for it have the same path in the container.
"""
OURS_LIVE: Final = CpiTraits(
    name="our Kubernetes CPI, live",
    settings=OURS.settings,
    sources=OURS.sources,
    deliver=mount_secret,
    place=f"{manifests.LIVE_DISKS}/{{cid}}",
    is_hint_an_object=True,
    attaches="live",
    loses_data_unasked=False,
)
STATEFUL_SET: Final = CpiTraits(
    name="a StatefulSet", deliver=mount_file, place="/var/vcap/store", tells_the_agent=False
)
"""There is no CPI. Instead, the StatefulSet's manifest mounts the volume where jobs expect it, and names that path in
the settings.
"""
