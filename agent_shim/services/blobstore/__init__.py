"""Where blobs come from and go to. Everything but their names happens in worker processes."""

from __future__ import annotations

from dataclasses import dataclass

from agent_shim.host.worker_client import BlobRef

__all__ = ["BlobRef", "Timing"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds and bytes."""

    connect: float = 10.0
    stall: float = 30.0
    """An attempt ends when less than ``least`` bytes came in this time."""
    least: int = 30 * 1024
    answer: float = 120.0
    """What a server may take to answer after it got the last byte."""
    hesitate: float = 1.0
    """How long to wait for "100 Continue", which some servers never say."""
    pause: float = 5.0
    """Between two attempts with a signed URL (blobstore_delegator.go)."""
