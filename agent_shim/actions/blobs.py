"""Receives blobs over the bus."""

from __future__ import annotations

import base64

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, action
from agent_shim.core.errors import errors_as
from agent_shim.core.wire import DigestText


class Upload(msgspec.Struct, frozen=True):
    """Argument of ``upload_blob``. The payload is base64 with line breaks, as Ruby writes it."""

    blob_id: str = ""
    checksum: DigestText = ""
    payload: str = ""


@action("upload_blob", Mode.TASK)
async def upload_blob(agent: Agent, upload: Upload) -> str:
    """Store a blob for a later ``prepare`` or ``apply`` (agent/action/upload_blob.go)."""
    with errors_as("illegal base64 data", ValueError):
        # Remove the line breaks, because ``validate`` rejects them.
        content = base64.b64decode(upload.payload.replace("\n", "").replace("\r", ""), validate=True)
    await agent.bundles.keep_blob(upload.blob_id, upload.checksum, content)
    return upload.blob_id
