"""Stores the apply spec in ``spec.json``, which is written atomically
(agent/applier/applyspec/concrete_v1_service.go).
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from agent_shim.core import spec
from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.host import files

logger = logging.getLogger(__name__)


class SpecStore:
    """Stores the spec. ``current`` is the spec from the last ``apply``, or an empty spec before the first ``apply``."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self.current = spec.ApplySpec()

    async def load(self) -> spec.ApplySpec:
        """Load the file. An unreadable file is renamed and treated as missing, so that the agent stays reachable."""
        try:
            self.current = spec.decode(await asyncio.to_thread(files.read, self._paths.spec, is_own=True))
        except FileNotFoundError:
            self.current = spec.ApplySpec()
        except (OSError, ActionError) as exc:
            logger.error("cannot use %s: %s", self._paths.spec, exc)
            await asyncio.to_thread(files.keep_unreadable, self._paths.spec)
            self.current = spec.ApplySpec()
        return self.current

    async def save(self, wanted: spec.ApplySpec) -> None:
        """Store ``wanted`` in a private file, because it contains signed URLs, which are secrets."""
        await asyncio.to_thread(files.write_atomic, self._paths.spec, msgspec.json.encode(wanted), mode=0o600)
        self.current = wanted

    def write_instance_files(self) -> None:
        """Write ``id``, ``az``, ``name`` and ``deployment`` below ``instance`` (agent/action/apply.go). Blocks.

        The files are world-readable, have no newline at the end, and are empty if the spec does not contain the value.
        A file whose content has not changed is not written.
        """
        files.make_dir(self._paths.instance, 0o755)
        for name in ("id", "az", "name", "deployment"):
            text = getattr(self.current, name).encode()
            files.write_atomic(self._paths.instance / name, text, mode=0o644, if_changed=True)
