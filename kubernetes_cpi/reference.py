"""``python -m kubernetes_cpi.reference`` prints the property lists of docs/cpi.md, generated from the types."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from kubernetes_cpi import schema
from kubernetes_cpi.config import Config
from kubernetes_cpi.properties import DiskProperties, NetworkProperties, VmProperties

SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "CPI properties": Config,
    "Cloud properties of VMs": VmProperties,
    "Cloud properties of disks": DiskProperties,
    "Cloud properties of networks": NetworkProperties,
}


_PORT: Final = "ports[]."
"""Marks the keys of a port, which occur in several structs."""


def sections() -> str:
    """Return all property lists as Markdown."""
    return "\n".join(f"### {title}\n\n{property_list(struct)}" for title, struct in SECTIONS.items())


def property_list(struct: type[msgspec.Struct]) -> str:
    """Return a struct's properties as a Markdown list. Each item contains the key, type, default and description.

    The keys of a port are listed only among the VM properties.
    """
    lines = []
    for key, kind, default, text in schema.rows(struct):
        if _PORT not in key or (struct is VmProperties and key.startswith(_PORT)):
            lines.append(f"- `{key}` [{kind}{f' ({default})' if default else ''}] {text}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(sections())
