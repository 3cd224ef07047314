"""Formats a release's notes, checksums and sizes as text. These functions write no files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

SUMS: Final = "SHA256SUMS"
_CHUNK: Final = 1 << 20


def notes(changelog: str, version: str) -> str:
    """Return a version's section in CHANGELOG.md, or *Unreleased* for a version between releases.

    Raises ``ValueError`` if the section is missing, or if there are unreleased changes in addition to that version's.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    found = {one.partition("\n")[0].strip(): one.partition("\n")[2].strip() for one in sections}
    name = "Unreleased" if "-dev" in version else version
    if not found.get(name):
        raise ValueError(f"CHANGELOG.md has no section {name}; write one")
    if name == version and found.get("Unreleased"):
        raise ValueError(f"CHANGELOG.md has changes below Unreleased; move them to {version}")
    head = f"agent_shim {version}" if name == version else f"agent_shim {version}, not a release"
    return f"# {head}\n\n{found[name]}\n"


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def sums(directory: Path) -> str:
    """Return the checksums of all files in a directory in ``sha256sum`` format, sorted by name."""
    return "".join(f"{digest(path)}  {path.name}\n" for path in _files(directory))


def sizes(directory: Path) -> str:
    """Return a table with the size and name of each file in a directory."""
    return "".join(f"{path.stat().st_size / 1e6:9.2f} MB  {path.name}\n" for path in _files(directory))


def differing(before: str, after: str) -> Mapping[str, str]:
    """Return how files differ between two lists of checksums.

    The result maps each name to "content", "only before" or "only after".
    """
    old, new = _by_name(before), _by_name(after)
    changed = {name: "content" for name in old.keys() & new.keys() if old[name] != new[name]}
    gone = dict.fromkeys(old.keys() - new.keys(), "only before")
    come = dict.fromkeys(new.keys() - old.keys(), "only after")
    return dict(sorted((changed | gone | come).items()))


def _by_name(lines: str) -> dict[str, str]:
    return {name: value for value, _, name in (line.partition("  ") for line in lines.splitlines())}


def _files(directory: Path) -> Iterable[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file() and path.name != SUMS)
