"""Blobstores: fetching and storing blobs. All but the names here runs in worker processes."""

from __future__ import annotations

import msgspec

from agent_shim.host.worker_client import BlobRef

__all__ = ["BlobRef", "Timing"]


class Timing(msgspec.Struct, frozen=True):
    """Timeouts in seconds, sizes in bytes."""

    connect: float = 10.0
    stall: float = 30.0
    """An attempt fails if less than ``least`` bytes arrive in this time."""
    least: int = 30 * 1024
    answer: float = 120.0
    """For a server to answer after it received the last byte."""
    hesitate: float = 1.0
    """For "100 Continue", which some servers never send."""
    pause: float = 5.0
    """Between two attempts with a signed URL (blobstore_delegator.go)."""
