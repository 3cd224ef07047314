"""``python -m kubernetes_cpi.reference`` prints the property lists of docs/cpi.md, generated from the types."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kubernetes_cpi import schema
from kubernetes_cpi.config import Config
from kubernetes_cpi.properties import DiskProperties, NetworkProperties, VmProperties

TABLES: Final[Mapping[str, type[msgspec.Struct]]] = {
    "CPI properties": Config,
    "Cloud properties of VMs": VmProperties,
    "Cloud properties of disks": DiskProperties,
    "Cloud properties of networks": NetworkProperties,
}


_PORT: Final = "ports[]."


def tables() -> str:
    """Return all property lists as Markdown."""
    return "\n".join(f"### {title}\n\n{table(struct)}" for title, struct in TABLES.items())


def table(struct: type[msgspec.Struct]) -> str:
    """Return a struct's properties as a Markdown table with three columns: key, type and default, and meaning.

    The keys of a port are listed only in the table of VM properties.
    """
    lines = []
    for key, kind, default, text in schema.rows(struct):
        if _PORT not in key or (struct is VmProperties and key.startswith(_PORT)):
            lines.append(f"- `{key}` [{kind}{f' ({default})' if default else ''}] {text}")
    return "\n".join(lines) + "\n"


def properties() -> Iterator[tuple[str, str, str, str]]:
    """Return the key, type, default and description of every CPI property, for the job spec in the CPI's release."""
    return schema.rows(Config)


if __name__ == "__main__":
    sys.stdout.write(tables())
