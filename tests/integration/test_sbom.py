"""Tests the SBOMs for the agent and the CPI, and the licences of the packages in them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sbom(*arguments: str) -> str:
    program = [sys.executable, str(ROOT / "stemcell_overlay/sbom.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("name", "file"), [("agent-shim", "runtime.lock"), ("bosh-kubernetes-cpi", "cpi.lock")])
def test_sbom_contains_every_locked_package_with_its_hashes(name: str, file: str) -> None:
    """The SBOM must match the lock files from which the image and the CPI release are installed."""
    lock = (ROOT / "requirements" / file).read_text()
    pinned = set(re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", lock, re.MULTILINE))

    document = json.loads(sbom("--name", name, "--lock", str(ROOT / "requirements" / file)))

    assert {(one["name"], one["version"]) for one in document["components"]} == pinned
    assert sum(len(one["hashes"]) for one in document["components"]) == lock.count("--hash=sha256:")
    assert document["metadata"]["component"]["name"] == name


@pytest.mark.parametrize(("name", "file"), [("agent-shim", "runtime.lock"), ("bosh-kubernetes-cpi", "cpi.lock")])
def test_sbom_dependencies_reach_each_package(name: str, file: str) -> None:
    document = json.loads(sbom("--name", name, "--lock", str(ROOT / "requirements" / file)))
    below = {one["ref"]: one["dependsOn"] for one in document["dependencies"]}
    reached, new = set(), {name}
    while new:
        reached |= new
        new = {ref for above in new for ref in below[above]} - reached

    assert reached == {name, *(one["bom-ref"] for one in document["components"])}
    if name == "agent-shim":
        assert set(below[name]) > {ref for ref in reached if ref.startswith("pkg:pypi/aiohttp@")}
        assert [ref for ref in below[name] if ref.startswith("pkg:pypi/frozenlist@")] == []


def test_licences_of_all_packages_are_permitted() -> None:
    lines = sbom("--licences").splitlines()

    assert len(lines) > 5
    assert [line for line in lines if re.search(r"\b(A?GPL|SSPL|Commons Clause)", line)] == []
