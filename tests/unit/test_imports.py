"""Libraries are imported without what they do for nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WATCHED = """
import ssl
real, reads = ssl.SSLContext.load_default_certs, []
ssl.SSLContext.load_default_certs = lambda *args, **more: (reads.append(1), real(*args, **more))
import {module}
assert "aiohttp" in __import__("sys").modules
print(len(reads), ssl.create_default_context().verify_mode.name, len(reads))
"""


@pytest.mark.parametrize("module", ["agent_shim.blobstore.transfer", "agent_shim.bus.https"])
def test_no_authorities_are_read_before_somebody_wants_them(module: str) -> None:
    """Afterwards a context is again what it was."""
    program = _WATCHED.format(module=module)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert said.split() == ["0", "CERT_REQUIRED", "1"]
