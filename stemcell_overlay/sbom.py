#!/usr/bin/env python3
"""``./dev sbom`` prints the agent's dependencies with hashes, licences and their own dependencies, in CycloneDX 1.5.

Versions, hashes and dependencies come from a lock file (``--lock``, which defaults to the image's lock file), and
licences from the installed packages. ``--licences`` prints a table instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from hatch_build import version  # noqa: E402 - a module in the parent directory

LOCK: Final = ROOT / "requirements/runtime.lock"
_PINNED: Final = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_NEEDED_BY: Final = re.compile(r"^    #(?: via|  ) ([A-Za-z0-9._-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Component:
    """A package in the lock file.

    ``hashes`` contains the hashes of all its wheels, only one of which is installed.
    """

    name: str
    version: str
    hashes: tuple[str, ...]
    licence: str
    needed_by: tuple[str, ...]
    """Packages in the lock file that depend on this package. The agent itself is left out."""


def components(lock: str) -> Iterator[Component]:
    """Yield the packages in a lock file, in the order of the file."""
    for entry in re.split(r"\n(?=[A-Za-z0-9])", lock):
        pinned = _PINNED.match(entry)
        if pinned is not None:
            yield Component(
                pinned[1], pinned[2], tuple(_HASH.findall(entry)), licence(pinned[1]), tuple(_NEEDED_BY.findall(entry))
            )


def licence(name: str) -> str:
    """Return the licence of an installed package, or "unknown".

    It comes from the package's licence expression, else from its classifiers, else from its licence field.
    """
    try:
        fields = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # The package is for another operating system or Python version.
    text = fields.get("License-Expression") or ""
    if not text:
        classifiers = fields.get_all("Classifier") or []
        text = ", ".join(line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: "))
    return text or (fields.get("License") or "unknown").splitlines()[0]


def document(name: str, version: str, found: list[Component]) -> dict[str, Any]:
    """Return a CycloneDX 1.5 document that lists the packages in ``found``."""
    refs = {one.name: f"pkg:pypi/{one.name.lower()}@{one.version}" for one in found}
    dependencies: dict[str, list[str]] = {ref: [] for ref in (name, *refs.values())}
    for one in found:
        # A package that no other package needs is needed by the program itself.
        for dependent in {refs.get(needed, name) for needed in one.needed_by}:
            dependencies[dependent].append(refs[one.name])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": name, "name": name, "version": version}},
        "dependencies": [{"ref": ref, "dependsOn": needed} for ref, needed in dependencies.items()],
        "components": [
            {
                "type": "library",
                "bom-ref": refs[one.name],
                "name": one.name,
                "version": one.version,
                "purl": refs[one.name],
                "licenses": [{"license": {"name": one.licence}}],
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in one.hashes],
            }
            for one in found
        ],
    }


def main() -> int:
    """Print the document, or with ``--licences`` the table."""
    parser = argparse.ArgumentParser(prog="./dev sbom", description=__doc__)
    parser.add_argument("--licences", action="store_true", help="print a table of names, versions and licences")
    parser.add_argument("--name", default="agent-shim", help="name of the program (default: agent-shim)")
    parser.add_argument("--lock", type=Path, default=LOCK, help="lock file (default: requirements/runtime.lock)")
    asked = parser.parse_args()
    found = list(components(asked.lock.read_text()))
    if asked.licences:
        sys.stdout.writelines(f"{one.name:20} {one.version:12} {one.licence}\n" for one in found)
    else:
        made = document(asked.name, version(), found)
        sys.stdout.write(f"{json.dumps(made, indent=1)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
