"""The operating system in ``/etc/os-release``, under the name that stemcells give it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator


def operating_system(text: str) -> str:
    """Return ``ubuntu-noble`` from the content of os-release. Raises ``ValueError``.

    The file ``operating_system`` of stemcells is no source of it: it has ``ubuntu`` on every stemcell, and here on
    Debian too, because it is the Go agent's option ``-P``, for which that agent knows no Debian.
    """
    members = dict(_assigned(text))
    for name in ("ID", "VERSION_CODENAME"):
        if not members.get(name):
            raise ValueError(f"{name} not found")
    return f"{members['ID']}-{members['VERSION_CODENAME']}"


def _assigned(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each line, quoted as for a shell."""
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            try:
                yield name, "".join(shlex.split(value))
            except ValueError as exc:
                raise ValueError(f"{line!r}: {exc}") from exc
