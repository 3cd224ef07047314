"""The local half of ``sync_dns``: what the Director knows of all instances, for bosh-dns and for ``/etc/hosts``.

bosh-dns reads ``records.json``, byte for byte what the Director wrote; so that comes first and decides. ``/etc/hosts``
is a help for those who do not ask bosh-dns: in a pod it may be read-only or a mount, which must not make DNS stale.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.errors import ActionError
from agent_shim.host import files
from agent_shim.paths import Paths

logger = logging.getLogger(__name__)

FETCH: Final = 45.0
"""Seconds that the fetch of a blob may take in all; the Director listens for ten."""

_ADDRESS: Final = re.compile(r"[0-9A-Fa-f.:]{2,45}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,255}")


class _Blob(msgspec.Struct, frozen=True):
    """``{"version": 3, "records": [["10.0.0.1", "name"], …], …}``; the rest is between the Director and bosh-dns."""

    version: int = 0
    records: msgspec.Raw = msgspec.Raw(b"[]")


class Dns:
    """Keeps the newest records; both ``sync_dns`` and ``sync_dns_with_signed_url`` come here."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._turn = asyncio.Lock()

    async def sync(self, version: int, fetch: Callable[[], Awaitable[bytes]], *, agent_id: str) -> None:
        """See that the records are those of ``version`` or newer; ``fetch`` gets the verified blob when it is needed.

        Raises ``ActionError`` in the words of agent/action/sync_dns.go, and what ``fetch`` raises.
        """
        if await self._has(version):
            return
        async with self._turn:
            if not await self._has(version):
                try:
                    async with asyncio.timeout(FETCH):
                        records = await fetch()
                except TimeoutError:
                    raise ActionError(f"fetching new DNS records: no blob within {FETCH:g} seconds") from None
                await asyncio.to_thread(self._store, records, version, agent_id)

    async def restore(self, agent_id: str) -> bool:
        """Write the stored records into the hosts file again: a new container has a fresh one. False without any.

        Raises ``ActionError``.
        """
        async with self._turn:
            return await asyncio.to_thread(self._restore, agent_id)

    async def _has(self, version: int) -> bool:
        return await asyncio.to_thread(stored_version, self._paths.dns_records) >= version

    def _store(self, raw: bytes, version: int, agent_id: str) -> None:
        try:
            blob = msgspec.json.decode(raw, type=_Blob)
        except msgspec.DecodeError as exc:
            raise ActionError(f"unmarshalling DNS records: {exc}") from exc
        if blob.version != version:
            raise ActionError("version from unpacked dns blob does not match version supplied by director")
        records = self._paths.dns_records
        try:
            files.make_dir(self._paths.instance, 0o755)
            files.make_dir(records.parent, 0o755)
            files.write_atomic(records, raw, mode=0o640, owner=self._paths.shared_owner)
        except OSError as exc:
            raise ActionError(f"saving local DNS state: {exc}") from exc
        try:
            self._write_hosts(blob, agent_id)
        except ActionError as exc:
            logger.warning("%s", exc)

    def _restore(self, agent_id: str) -> bool:
        try:
            blob = msgspec.json.decode(self._paths.dns_records.read_bytes(), type=_Blob)
        except FileNotFoundError:
            return False
        except (OSError, msgspec.DecodeError) as exc:
            raise ActionError(f"cannot read {self._paths.dns_records}: {exc}") from exc
        self._write_hosts(blob, agent_id)
        return True

    def _write_hosts(self, blob: _Blob, agent_id: str) -> None:
        hosts = self._paths.etc / "hosts"
        try:
            records = msgspec.json.decode(blob.records, type=list[list[str]] | None) or []
            hosts.parent.mkdir(parents=True, exist_ok=True)
            kept = lines_naming(socket.gethostname(), hosts) if agent_id != socket.gethostname() else []
            files.write_atomic(hosts, hosts_text(agent_id, kept, records).encode(), mode=0o644)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ActionError(f"{hosts} holds no names of other instances: {exc}") from exc


def stored_version(records: Path) -> int:
    """The version of a ``records.json``; -1, which is older than any, if there is none that can be read."""
    try:
        return msgspec.json.decode(records.read_bytes(), type=_Blob).version
    except (OSError, msgspec.DecodeError):
        return -1


def lines_naming(hostname: str, hosts: Path) -> list[str]:
    """What a hosts file says of ``hostname``: the line that a container runtime wrote for the container itself."""
    if not hosts.exists():
        return []
    lines = hosts.read_text(errors="replace").splitlines()
    return [line for line in lines if hostname in line.partition("#")[0].split()[1:]]


def hosts_text(agent_id: str, kept: Iterable[str], records: Iterable[list[str]]) -> str:
    """A hosts file in which the agent id is this machine (platform/linux_platform.go, SaveDNSRecords).

    A record that is not an address and a name is left out: a line break in it would make lines of its own.
    """
    own = agent_id if _NAME.fullmatch(agent_id) else "localhost"
    header = [
        f"127.0.0.1 localhost {own}",
        f"::1 localhost ip6-localhost ip6-loopback {own}",
        "fe00::0 ip6-localnet",
        "ff00::0 ip6-mcastprefix",
        "ff02::1 ip6-allnodes",
        "ff02::2 ip6-allrouters",
        "ff02::3 ip6-allhosts",
    ]
    good = [
        f"{record[0]} {record[1]}"
        for record in records
        if len(record) >= 2 and _ADDRESS.fullmatch(record[0]) and _NAME.fullmatch(record[1])
    ]
    return "\n".join([*header, *kept, *good, ""])
