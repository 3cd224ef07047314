"""Methods by name, with their arguments and the functions that serve them. ``kubernetes_cpi.door`` serves `info`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import msgspec

from kubernetes_cpi import config as configuration
from kubernetes_cpi import disks, log, names, session, snapshots, stemcells, vms
from kubernetes_cpi.config import Config
from kubernetes_cpi.errors import InputError, NotImplementedByCpiError

Hash = dict[str, Any]


class Arguments(msgspec.Struct, frozen=True, array_like=True):
    """Positional arguments of a method; surplus ones are ignored, as a newer Director may send more."""


class Cid(Arguments, frozen=True, array_like=True):
    cid: names.Cid


class Stemcell(Arguments, frozen=True, array_like=True):
    cid: str


class Metadata(Arguments, frozen=True, array_like=True):
    cid: names.Cid
    metadata: Hash


class ResizeDisk(Arguments, frozen=True, array_like=True):
    cid: names.Cid
    size_mib: int


class UpdateDisk(Arguments, frozen=True, array_like=True):
    cid: names.Cid
    size_mib: int
    cloud_properties: Hash | None = None


class VmAndDisk(Arguments, frozen=True, array_like=True):
    vm: names.Cid
    disk: names.Cid


class CreateStemcell(Arguments, frozen=True, array_like=True):
    image_path: str | None
    cloud_properties: Hash


class CreateDisk(Arguments, frozen=True, array_like=True):
    size_mib: int
    cloud_properties: Hash | None = None
    vm: names.Cid | None = None


class Requirements(Arguments, frozen=True, array_like=True):
    requirements: Hash


class Method(msgspec.Struct, frozen=True):
    """A method; ``serve`` gets the session, or only the configuration if it needs no cluster."""

    arguments: type[msgspec.Struct]
    serve: Callable[[Any, Any], Any]
    is_local: bool = False


METHODS: Final[Mapping[str, Method]] = {
    "create_stemcell": Method(
        CreateStemcell, lambda config, given: stemcells.create(given.cloud_properties, config.stemcells), is_local=True
    ),
    "delete_stemcell": Method(Stemcell, lambda *_: None, is_local=True),
    "calculate_vm_cloud_properties": Method(
        Requirements, lambda _, given: vms.calculate_properties(given.requirements), is_local=True
    ),
    "create_vm": Method(vms.Wanted, vms.create),
    "delete_vm": Method(Cid, lambda session, given: vms.delete(session, given.cid)),
    "has_vm": Method(Cid, lambda session, given: vms.has(session, given.cid)),
    "reboot_vm": Method(Cid, lambda session, given: vms.reboot(session, given.cid)),
    "current_vm_id": Method(Arguments, lambda session, _: vms.current(session)),
    "set_vm_metadata": Method(Metadata, lambda session, given: vms.set_metadata(session, given.cid, given.metadata)),
    "create_disk": Method(
        CreateDisk,
        lambda session, given: disks.create(session, given.size_mib, given.cloud_properties or {}, given.vm),
    ),
    "delete_disk": Method(Cid, lambda session, given: disks.delete(session, given.cid)),
    "has_disk": Method(Cid, lambda session, given: disks.has(session, given.cid)),
    "attach_disk": Method(VmAndDisk, lambda session, given: disks.attach(session, given.vm, given.disk)),
    "detach_disk": Method(VmAndDisk, lambda session, given: disks.detach(session, given.vm, given.disk)),
    "get_disks": Method(Cid, lambda session, given: disks.of_vm(session, given.cid)),
    "set_disk_metadata": Method(
        Metadata, lambda session, given: disks.set_metadata(session, given.cid, given.metadata)
    ),
    "resize_disk": Method(ResizeDisk, lambda session, given: disks.resize(session, given.cid, given.size_mib)),
    "update_disk": Method(
        UpdateDisk,
        lambda session, given: disks.update(session, given.cid, given.size_mib, given.cloud_properties or {}),
    ),
    "snapshot_disk": Method(Metadata, lambda session, given: snapshots.create(session, given.cid, given.metadata)),
    "delete_snapshot": Method(Cid, lambda session, given: snapshots.delete(session, given.cid)),
}


def call(name: str, arguments: Sequence[Any], context: Mapping[str, Any], file: str) -> Any:
    """Call the method ``name`` and return its result."""
    method = METHODS.get(name)
    if method is None:
        raise NotImplementedByCpiError(f"cannot {name}: this CPI does not have the method")
    _hide_secrets(name, arguments)
    try:
        given = msgspec.convert(arguments, method.arguments)
    except msgspec.ValidationError as exc:
        raise InputError(f"cannot {name}: its arguments do not fit: {exc}") from None
    config: Config = configuration.load(file, context)
    if method.is_local:
        return method.serve(config, given)
    with closing(session.opened(config, context)) as opened:
        return method.serve(opened, given)


def _hide_secrets(name: str, arguments: Sequence[Any]) -> None:
    """Hide the values that Directors redact: `env`, except groups and tags."""
    at = vms.Wanted.__struct_fields__.index("env")
    if name == "create_vm" and len(arguments) > at:
        log.hide(arguments[at])
