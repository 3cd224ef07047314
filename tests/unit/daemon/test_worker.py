"""In which order the worker brings to disk what it has unpacked; what it does is in ``integration/test_worker.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_shim.daemon import worker
from agent_shim.host import files
from agent_shim.host.worker_client import BlobRef, Target


def test_a_bundle_has_its_name_only_when_all_of_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in between leaves no directory that looks installed."""
    bundle, temp = tmp_path / "bundle", tmp_path / ".bundle.tmp-00000000"
    temp.mkdir()
    (temp / "file").write_text("x")
    seen = []

    def synced(_: Path) -> None:
        seen.append(bundle.exists())

    monkeypatch.setattr(files, "sync_filesystem", synced)
    monkeypatch.setattr(files, "sync_directory", synced)
    worker.finish([worker.Piece(Target("package", "p", str(bundle), BlobRef()), temp)])

    assert seen == [False, True]
    assert (bundle / "file").read_text() == "x"
