"""Tests that the systemd unit files are valid according to systemd-analyze."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.source import ROOT

pytestmark = pytest.mark.root

UNIT = ROOT / "systemd" / "agent-shim.service"
PROGRAMS = ("/opt/agent_shim/launch", "/opt/agent_shim/bin/agent-shim")
"""Programs that exist only in the image. Before a unit is checked, /bin/true replaces them in its text."""


def verify(directory: Path, text: str, name: str = UNIT.name) -> str:
    """Return what ``systemd-analyze verify`` prints about a unit. Its exit code is ignored, because it can be 0 even if
    there are problems.
    """
    if shutil.which("systemd-analyze") is None:
        pytest.fail("systemd-analyze is missing: apt-get install --no-install-recommends systemd")
    unit = directory / name
    for program in PROGRAMS:
        text = text.replace(program, "/bin/true")
    unit.write_text(text)
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    return result.stdout + result.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in UNIT.parent.glob("*.service")))
def test_systemd_unit_is_valid(tmp_path: Path, name: str) -> None:
    assert verify(tmp_path, (UNIT.parent / name).read_text(), name) == ""


def test_systemd_unit_check_detects_an_unknown_key(tmp_path: Path) -> None:
    """This shows that ``test_systemd_unit_is_valid`` would notice an error in the unit file."""
    assert "Unknown key" in verify(tmp_path, UNIT.read_text().replace("KillMode=", "KilMode="))
