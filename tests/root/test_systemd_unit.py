"""The unit file, read by systemd itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.structure.source import ROOT

pytestmark = pytest.mark.root

UNIT = ROOT / "systemd" / "agent-shim.service"


def verify(directory: Path, text: str) -> str:
    """Return the complaints of systemd-analyze about a unit: it can print some and still exit with 0."""
    if shutil.which("systemd-analyze") is None:
        pytest.fail("systemd-analyze is missing: apt-get install --no-install-recommends systemd")
    unit = directory / UNIT.name
    # The program is in the image, not here; everything else is judged as it stands.
    unit.write_text(text.replace("/opt/agent_shim/launch", "/bin/true"))
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    return result.stdout + result.stderr


def test_unit_is_right(tmp_path: Path) -> None:
    """systemd knows every key and value."""
    assert verify(tmp_path, UNIT.read_text()) == ""


def test_wrong_unit_is_noticed(tmp_path: Path) -> None:
    """A key that systemd does not know is one that this test sees."""
    assert "Unknown key" in verify(tmp_path, UNIT.read_text().replace("KillMode=", "KilMode="))
