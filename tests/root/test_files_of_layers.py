"""Files of an image layer, below a real overlay that is invisible elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_shim.host import files
from tests.support.volumes import alone, mount_overlay, mount_tmpfs

pytestmark = pytest.mark.root


@alone
def test_a_tree_of_an_image_layer_is_removed(tmp_path: Path) -> None:
    """Its directories cannot be renamed (EXDEV). A job can nest thousands below them."""
    layers = mount_tmpfs(tmp_path / "layers")
    (layers / "lower/jobs/web/bin").mkdir(parents=True)
    (layers / "lower/jobs/web/bin/ctl").touch()
    root = mount_overlay(tmp_path / "root", layers)
    deepest = os.open(root / "jobs/web/bin", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=deepest)
        deepest, above = os.open("d", os.O_RDONLY, dir_fd=deepest), deepest
        os.close(above)
    os.close(deepest)

    files.remove_tree(root / "jobs")

    assert list(root.iterdir()) == []
