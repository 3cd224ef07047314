"""Tests the source distribution, which must contain everything that packagers need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source import ROOT


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory into which this checkout's source distribution was unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    (archive,) = out.glob("*.tar.gz")
    subprocess.run(["tar", "-C", out, "-xzf", archive], check=True)
    return out / archive.name.removesuffix(".tar.gz")


@pytest.mark.slow
def test_source_distribution_passes_its_unit_tests(unpacked: Path) -> None:
    """Variables such as ``PYTHONSAFEPATH`` are removed. Otherwise, the tests would import this checkout's modules."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    subprocess.run([sys.executable, "hatch_build.py"], cwd=unpacked, env=clean, check=True)

    argv = [sys.executable, "-m", "pytest", "-q", "-n2", "-m", "not slow and not root", "-p", "no:cacheprovider"]
    done = subprocess.run([*argv, "tests/unit"], cwd=unpacked, env=clean, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr


def test_source_distribution_has_all_directories_and_no_build_files(unpacked: Path) -> None:
    parts = {path.name for path in unpacked.iterdir()}

    assert {
        "tests",
        "docs",
        "deploy",
        "tools",
        "requirements",
        "dev",
        "Dockerfile",
        "LICENSE",
        "MAINTAINERS.md",
    } <= parts
    assert parts.isdisjoint({".git", ".venv", ".tools", "dist"})
    assert os.access(unpacked / "dev", os.X_OK)
