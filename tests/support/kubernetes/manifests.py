"""Renders the manifests in ``deploy/`` as kubectl would apply them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.source import ROOT

DEPLOY = ROOT / "deploy/kubernetes"


def manifests(name: str) -> str:
    """Return the manifests in ``deploy/kubernetes/NAME`` as YAML, built by kustomize if it has a kustomization."""
    if not (DEPLOY / name / "kustomization.yaml").exists():
        return "---\n".join(path.read_text() for path in sorted((DEPLOY / name).glob("*.yaml")))
    if shutil.which("kubectl") is None:
        pytest.fail("kubectl is missing: apt-get install --no-install-recommends kubernetes-client")
    done = subprocess.run(["kubectl", "kustomize", DEPLOY / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
