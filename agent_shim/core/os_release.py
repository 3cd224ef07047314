"""Derives the stemcell's name for the operating system from the text of ``/etc/os-release``. This module performs no
I/O.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator


def operating_system(text: str) -> str:
    """Return a name such as ``ubuntu-noble`` for the text of an os-release file. Raises ``ValueError`` if ``ID`` or
    ``VERSION_CODENAME`` is missing.

    The stemcell's ``operating_system`` file cannot be used for this. It contains ``ubuntu`` even on Debian, because it
    is passed to the Go agent as the ``-P`` option, and that agent does not support Debian.
    """
    members = dict(_assigned(text))
    for name in ("ID", "VERSION_CODENAME"):
        if not members.get(name):
            raise ValueError(f"{name} not found")
    return f"{members['ID']}-{members['VERSION_CODENAME']}"


def _assigned(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each assignment. Values are quoted as in a shell, so the quotes are removed. Raises
    ``ValueError`` if the quoting is invalid.
    """
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            try:
                yield name, "".join(shlex.split(value))
            except ValueError as exc:
                raise ValueError(f"{line!r}: {exc}") from exc
