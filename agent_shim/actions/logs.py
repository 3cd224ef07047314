"""Creates log archives for operators. The archives are uploaded for the Director, or stored locally for the CLI."""

from __future__ import annotations

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, action


class LogBundle(msgspec.Struct, frozen=True):
    """Argument of ``bundle_logs``. ``owning_user`` is a user or ``user:group``."""

    owning_user: str = ""
    log_type: str = ""
    filters: list[str] = []


class SignedLogs(msgspec.Struct, frozen=True):
    """Argument of ``fetch_logs_with_signed_url``."""

    signed_url: str = ""
    log_type: str = ""
    filters: list[str] = []
    blobstore_headers: dict[str, str] = {}


@action("fetch_logs", Mode.TASK)
async def fetch_logs(agent: Agent, log_types: str, filters: list[str]) -> dict[str, str]:
    """Upload a log archive to the blobstore (agent/action/fetch_logs.go). ``log_types`` is a comma-separated list of
    ``job``, ``agent`` and ``system``.
    """
    done = await agent.logs.send(log_types, filters, agent.settings.current.blobstore, agent.tasks.report)
    return {"blobstore_id": done.blob_id, "sha1": done.sha1}


@action("fetch_logs_with_signed_url", Mode.TASK)
async def fetch_logs_with_signed_url(agent: Agent, request: SignedLogs) -> dict[str, str]:
    """Upload a log archive to a signed URL (agent/action/fetch_logs_with_signed_url.go). The reply has no blob id,
    because only the Director knows it.
    """
    store, url, headers = agent.settings.current.blobstore, request.signed_url, request.blobstore_headers
    done = await agent.logs.send(
        request.log_type, request.filters, store, agent.tasks.report, signed_url=url, headers=headers
    )
    return {"sha1": f"{done.sha1};sha512:{done.sha512}"}


@action("bundle_logs", Mode.NOW)
async def bundle_logs(agent: Agent, request: LogBundle) -> dict[str, str]:
    """Store a log archive locally, so that it can be fetched with scp (agent/action/bundle_logs.go)."""
    path, sha512 = await agent.logs.bundle(request.log_type, request.filters, request.owning_user)
    return {"logs_tar_path": str(path), "sha512": f"sha512:{sha512}"}


@action("remove_file", Mode.NOW)
async def remove_file(agent: Agent, path: str) -> str:
    """Remove an archive that ``bundle_logs`` created, or a file in the temporary directory. Refuse to remove any other
    file. (The Go agent removes any file: agent/action/remove_file.go.)
    """
    await agent.logs.remove(path)
    return path
