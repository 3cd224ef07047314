"""The manifests of ``deploy/`` as kubectl applies them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.source import ROOT

DEPLOY = ROOT / "deploy/kubernetes"


def manifests(name: str) -> str:
    """Return the documents for a cluster."""
    if not (DEPLOY / name / "kustomization.yaml").exists():
        return (DEPLOY / name / "pod.yaml").read_text()
    if shutil.which("kubectl") is None:
        pytest.fail("kubectl is missing: apt-get install --no-install-recommends kubernetes-client")
    done = subprocess.run(["kubectl", "kustomize", DEPLOY / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
