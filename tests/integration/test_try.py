"""Tests ``agent-shim try`` with a stand-in for podman (the image tests run it with the real one)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

TOOL = """#!/bin/sh
case "$*" in
  *--format*) echo false;;
  *inspect*) exit 1;;
  exec*) exit 1;;
  logs*) echo starting; echo 'cannot read the settings' >&2;;
esac
"""
"""A container tool whose container has already exited, after it has printed its error to standard error."""


def packed(files: dict[str, bytes]) -> bytes:
    """Return a gzipped tarball of ``files``."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return whole.getvalue()


def test_try_shows_the_errors_that_an_exited_container_has_printed(tmp_path: Path) -> None:
    job = packed({"job.MF": b"{name: web, packages: [], templates: {}, properties: {}}", "monit": b""})
    about = b"{name: tiny, version: '1', jobs: [{name: web, version: '1'}], packages: []}"
    (tmp_path / "tiny.tgz").write_bytes(packed({"release.MF": about, "jobs/web.tgz": job}))
    (tmp_path / "podman").write_text(TOOL)
    (tmp_path / "podman").chmod(0o755)
    argv = ["-m", "agent_shim", "try", str(tmp_path / "tiny.tgz"), "--tool", "podman"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environment)

    assert done.returncode != 0
    assert "starting\n" in done.stderr
    assert "cannot read the settings\n" in done.stderr
    assert "the container has ended; see its log above" in done.stderr
