"""Map CPI methods to the functions that implement them. Only `info` is implemented elsewhere, in
``kubernetes_cpi.endpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, get_type_hints

import msgspec

from kubernetes_cpi import config as configuration
from kubernetes_cpi import disks, log, session, snapshots, stemcells, vms
from kubernetes_cpi.config import Config
from kubernetes_cpi.errors import InputError, NotImplementedByCpiError

METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    "create_stemcell": stemcells.create,
    "delete_stemcell": stemcells.delete,
    "calculate_vm_cloud_properties": vms.calculate_properties,
    "create_vm": vms.create,
    "delete_vm": vms.delete,
    "has_vm": vms.has,
    "reboot_vm": vms.reboot,
    "current_vm_id": vms.current,
    "set_vm_metadata": vms.set_metadata,
    "create_disk": disks.create,
    "delete_disk": disks.delete,
    "has_disk": disks.has,
    "attach_disk": disks.attach,
    "detach_disk": disks.detach,
    "get_disks": disks.of_vm,
    "set_disk_metadata": disks.set_metadata,
    "resize_disk": disks.resize,
    "update_disk": disks.update,
    "snapshot_disk": snapshots.create,
    "delete_snapshot": snapshots.delete,
}
"""The function for each method. It takes a session (or, for the methods in ``LOCAL``, the configuration), followed by
the arguments of the method.
"""
LOCAL: Final = frozenset({"create_stemcell", "delete_stemcell", "calculate_vm_cloud_properties"})
"""Methods that need no cluster. Their functions take the configuration instead of a session."""
ENV: Final = slice(5, 6)
"""Position of `env` in create_vm's arguments. It is a slice, because a call with too few arguments has none."""


def call(name: str, arguments: Sequence[Any], context: Mapping[str, Any], file: str) -> Any:
    """Call the method ``name`` and return its result. ``file`` is the path of the configuration, or "" if there is
    none.
    """
    serve = METHODS.get(name)
    if serve is None:
        raise NotImplementedByCpiError(f"cannot {name}: this CPI does not have the method")
    if name == "create_vm":
        # Hide the values of the VM's environment in the log. The Director redacts them in its own log too.
        log.hide(list(arguments[ENV]))
    try:
        given = msgspec.structs.astuple(msgspec.convert(arguments, _arguments(serve)))
    except msgspec.ValidationError as exc:
        raise InputError(f"cannot {name}: its arguments do not fit: {exc}") from None
    config: Config = configuration.load(file, context)
    if name in LOCAL:
        return serve(config, *given)
    with closing(session.opened(config, context)) as opened:
        return serve(opened, *given)


def _arguments(serve: Callable[..., Any]) -> type[msgspec.Struct]:
    """Return a struct type whose fields are the parameters of ``serve``, except the first.

    Surplus arguments in a request are accepted, because a newer Director may send more.
    """
    types = get_type_hints(serve, include_extras=True)
    del types["return"]
    _, *fields = types.items()
    defaults = serve.__defaults__ or ()
    # ``defstruct`` takes a tuple (name, type), or (name, type, default), for each field.
    padded = [()] * (len(fields) - len(defaults)) + [(default,) for default in defaults]
    return msgspec.defstruct(
        "Arguments", [(*field, *end) for field, end in zip(fields, padded, strict=True)], array_like=True
    )
