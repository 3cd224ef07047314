"""Tests the order in which an install writes bundles to disk. ``integration/test_worker.py`` tests the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_shim.bulk import install
from agent_shim.bulk.protocol import BlobRef, UnpackTarget
from agent_shim.host import files


def test_bundle_gets_its_name_only_after_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a crash could leave an incomplete directory that looks like an installed bundle."""
    bundle, temp = tmp_path / "bundle", tmp_path / ".bundle.tmp-00000000"
    temp.mkdir()
    (temp / "file").write_text("x")
    seen = []

    def synced(_: Path) -> None:
        seen.append(bundle.exists())

    monkeypatch.setattr(files, "sync_filesystem", synced)
    install.finish([install.Piece(UnpackTarget("package", "p", str(bundle), BlobRef()), temp)])

    assert seen == [False, True]
    assert (bundle / "file").read_text() == "x"
