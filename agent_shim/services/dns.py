"""Maintains the files with DNS names: ``/etc/hosts`` and ``/var/vcap/instance/dns/records.json``.

bosh-dns reads ``records.json``, byte for byte as the Director wrote it. ``/etc/hosts`` helps programs that do not use
bosh-dns. ``records.json`` is written first, and the request succeeds if that works. In a pod, ``/etc/hosts`` may be
read-only or a mount, but that must not prevent the update of ``records.json``. At boot, with or without a
Director, the agent adds ``localhost`` and the host name. Some CPIs unmount the container runtime's hosts file (the
warden CPI even after the agent has started), and the file underneath contains neither name.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import ActionError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.host import clock, files, guarded, hostname, mounts, network

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S: Final = 45.0
"""Timeout for fetching a blob, in seconds. The Director itself waits only ten seconds."""

LOCALHOST: Final = "localhost"
POLL_S: Final = 10.0
"""Interval between checks of whether the hosts file has been replaced."""


class _Blob(msgspec.Struct, frozen=True):
    """Parsed ``{"version": 3, "records": [["10.0.0.1", "name"], …], …}``. Only bosh-dns reads the other fields."""

    version: int = 0
    records: msgspec.Raw = msgspec.Raw(b"[]")


class Dns:
    """Stores the newest DNS records for ``sync_dns`` and ``sync_dns_with_signed_url``."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._turn = asyncio.Lock()
        """Serializes changes to the records and the hosts file."""
        self._forgetting = asyncio.Lock()
        """Serializes ``forget_neighbours``."""

    async def sync(self, version: int, fetch: Callable[[], Awaitable[bytes]], *, agent_id: str) -> None:
        """Update the records to ``version`` or newer. ``fetch`` returns the verified blob; it is called only if the
        stored records are older.

        Raises ``ActionError`` with the error messages in agent/action/sync_dns.go, or any error that ``fetch`` raises.
        """
        if await self._has_version(version):
            return
        async with self._turn:
            if not await self._has_version(version):
                try:
                    async with asyncio.timeout(FETCH_TIMEOUT_S):
                        records = await fetch()
                except TimeoutError:
                    raise ActionError(f"fetching new DNS records: no blob within {FETCH_TIMEOUT_S:g} seconds") from None
                await asyncio.to_thread(self._store, records, version, agent_id)

    async def restore(self, agent_id: str) -> bool:
        """Write the stored records to the hosts file, because a new container has a new hosts file. Return False if
        there are no records.

        Raises ``ActionError``.
        """
        async with self._turn:
            blob = await asyncio.to_thread(self._stored)
            if blob is not None:
                await asyncio.to_thread(self._write_hosts, blob, agent_id)
        return blob is not None

    async def forget_neighbours(self, addresses: list[str]) -> None:
        """Delete the ARP entries for ``addresses`` if the container has permission to do so. Concurrent calls run one
        after the other.
        """
        async with self._forgetting:
            await network.forget_neighbours(addresses)

    async def name_self(self, agent_id: str) -> str | None:
        """Set the container's host name to the agent id, and add it and ``localhost`` to the hosts file.

        Boot step: return the reason if the host name could not be set, or None. Raises ``ActionError``.
        """
        reason = "the host name is kept, because the base directory is not /var/vcap"
        async with self._turn:
            if self._paths.is_system:
                reason = await asyncio.to_thread(hostname.set_host_name, agent_id)
            await asyncio.to_thread(self._complete_hosts, agent_id)
        return reason or None

    async def keep_names(self, agent_id: Callable[[], str]) -> NoReturn:
        """Whenever the hosts file is replaced, add ``localhost`` and the host name again. Never returns."""
        completed = None
        while True:
            current = await asyncio.to_thread(_identity, self._paths.etc / "hosts")
            if current != completed:
                completed = current
                try:
                    async with self._turn:
                        await asyncio.to_thread(self._complete_hosts, agent_id())
                except (ActionError, OSError) as exc:
                    logger.warning("cannot name this machine in the hosts file: %s", exc)
            await asyncio.sleep(clock.until_beat(POLL_S))

    async def _has_version(self, version: int) -> bool:
        return await asyncio.to_thread(stored_version, self._paths.dns_records) >= version

    def _store(self, raw: bytes, version: int, agent_id: str) -> None:
        """Check and store a blob, and write its records to the hosts file. A failure to write the hosts file is only
        logged.
        """
        with errors_as("unmarshalling DNS records", msgspec.DecodeError):
            blob = wire.decode(raw, _Blob)
        if blob.version != version:
            raise ActionError("version from unpacked dns blob does not match version supplied by director")
        records = self._paths.dns_records
        with errors_as("saving local DNS state"):
            files.make_dir(self._paths.instance, 0o755)
            files.make_dir(records.parent, 0o755)
            files.write_atomic(records, raw, mode=0o640, owner=self._paths.shared_owner)
        try:
            self._write_hosts(blob, agent_id)
        except ActionError as exc:
            logger.warning("%s", exc)

    def _stored(self) -> _Blob | None:
        """Return the records from the last ``sync_dns``, or None if there are none. ``restore`` writes them to the
        hosts file of a new container. Raises ``ActionError`` if the file is damaged.
        """
        try:
            return wire.decode(files.read(self._paths.dns_records, is_own=True), _Blob)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as exc:
            raise ActionError(f"cannot read {self._paths.dns_records}: {exc}") from exc

    def _complete_hosts(self, agent_id: str) -> None:
        """Add ``localhost`` and the host name to the hosts file if one of them is missing. A mounted file is appended
        to; any other file is replaced.
        """
        hosts, host_name = self._paths.etc / "hosts", socket.gethostname()
        missing = [name for name in (LOCALHOST, host_name) if not lines_naming(name, hosts)]
        if missing and mounts.is_mount_point(hosts):
            text = files.read(hosts).decode(errors="replace")
            text += "" if text.endswith("\n") or not text else "\n"
            files.write_atomic(hosts, "\n".join([text + own_lines(missing), ""]).encode())
        elif missing:
            self._write_hosts(self._stored() or _Blob(), agent_id)

    def _write_hosts(self, blob: _Blob, agent_id: str) -> None:
        """Replace the hosts file with one that contains the blob's records (:func:`hosts_text`)."""
        hosts, host_name = self._paths.etc / "hosts", socket.gethostname()
        what = f"{hosts} holds no names of other instances"
        with errors_as(what, OSError, msgspec.DecodeError, UnicodeDecodeError):
            # ``records`` can be null, which counts as an empty list.
            records: list[tuple[str, str]] = wire.convert(
                wire.decode(blob.records, object) or [], list[tuple[str, str]]
            )
            hosts.parent.mkdir(parents=True, exist_ok=True)
            # If the host name is the agent id, ``hosts_text`` maps it to this machine anyway.
            kept = lines_naming(host_name, hosts) if agent_id != host_name else []
            files.write_atomic(hosts, hosts_text(agent_id, host_name, kept, records).encode(), mode=0o644)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a file's device and inode numbers, which change when the file is replaced, or None if the file is
    missing.
    """
    try:
        status = guarded.status(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def stored_version(records: Path) -> int:
    """Return the version of a ``records.json``. If it is missing or unreadable, return -1, which is lower than any
    version.
    """
    try:
        return wire.decode(files.read(records, is_own=True), _Blob).version
    except (OSError, msgspec.DecodeError):
        return -1


def lines_naming(name: str, hosts: Path) -> list[str]:
    """Return the lines of a hosts file that contain ``name``."""
    if not hosts.exists():
        return []
    lines = files.read(hosts).decode(errors="replace").splitlines()
    return [line for line in lines if name in line.partition("#")[0].split()[1:]]


def own_lines(names: Sequence[str]) -> str:
    """Return lines for a hosts file that map ``names`` to this machine."""
    lines = [f"127.0.0.1 {name}" for name in names]
    lines += [f"::1 {LOCALHOST} ip6-localhost ip6-loopback"] if LOCALHOST in names else []
    return "\n".join(lines)


def hosts_text(agent_id: str, host_name: str, kept: Sequence[str], records: Iterable[tuple[str, str]]) -> str:
    """Return a hosts file that maps the agent id to this machine (platform/linux_platform.go, SaveDNSRecords).

    ``kept`` are the container runtime's lines for ``host_name``. If ``kept`` is empty, the host name is mapped to this
    machine too.
    """
    own = f"{agent_id} {LOCALHOST}"
    header = [
        f"127.0.0.1 {own}",
        f"::1 {own} ip6-localhost ip6-loopback",
        *("fe00::0 ip6-localnet", "ff00::0 ip6-mcastprefix"),
        *("ff02::1 ip6-allnodes", "ff02::2 ip6-allrouters", "ff02::3 ip6-allhosts"),
    ]
    if not kept and host_name not in own.split():
        kept = [own_lines([host_name])]
    others = [f"{address} {name}" for address, name in records]
    known = {*header, *others}
    return "\n".join([*header, *(line for line in dict.fromkeys(kept) if line not in known), *others, ""])
