"""Actions that update DNS records and delete ARP entries."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, action
from agent_shim.bulk.protocol import BlobRef
from agent_shim.core.errors import ActionError, errors_as
from agent_shim.core.wire import UINT64, DigestText
from agent_shim.host import network

Version = Annotated[int, UINT64]


@action("sync_dns", Mode.NOW)
async def sync_dns(agent: Agent, blob_id: str, digest: DigestText, version: Version) -> str:
    """Update the DNS records from the blob ``blob_id`` (agent/action/sync_dns.go)."""
    source = BlobRef(blob_id=blob_id, digest=digest)
    return await _sync(agent, source, version, f"getting {blob_id[:100]} from blobstore")


class SignedDnsRecords(msgspec.Struct, frozen=True):
    """Argument of ``sync_dns_with_signed_url``."""

    signed_url: str = ""
    multi_digest: DigestText = ""
    version: Version = 0
    blobstore_headers: dict[str, str] = {}


@action("sync_dns_with_signed_url", Mode.NOW)
async def sync_dns_with_signed_url(agent: Agent, request: SignedDnsRecords) -> str:
    """Update the DNS records from a signed URL (agent/action/sync_dns_with_signed_url.go)."""
    source = BlobRef(signed_url=request.signed_url, headers=request.blobstore_headers, digest=request.multi_digest)
    return await _sync(agent, source, request.version, "fetching new DNS records")


async def _sync(agent: Agent, source: BlobRef, version: int, doing: str) -> str:
    """Update the DNS records from ``source``. If they cannot be fetched, the error begins with ``doing``."""
    settings = agent.settings.current

    async def fetch() -> bytes:
        with errors_as(doing, ActionError):
            return await agent.bundles.fetch_small(source, settings.blobstore)

    await agent.dns.sync(version, fetch, agent_id=settings.agent_id)
    return "synced"


class ArpEntries(msgspec.Struct, frozen=True):
    ips: list[str] = []


@action("delete_arp_entries", Mode.NOW)
async def delete_arp_entries(agent: Agent, entries: ArpEntries) -> dict[str, Any]:
    """Delete the ARP entries of the given addresses, if the container has the required privilege. Invalid addresses
    are ignored.

    Never fails (delete_arp_entries.go).
    """
    await agent.dns.forget_neighbours([text for text in entries.ips if network.family_of(text)])
    return {}
