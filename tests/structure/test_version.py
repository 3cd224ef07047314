"""Checks that the version is defined only in ``agent_shim/__init__.py``, and that all files that repeat it agree with
that definition.
"""

from __future__ import annotations

import re
import tomllib

import pytest

import hatch_build
from agent_shim import __version__
from tests.support.source import ROOT, texts

READERS = {"agent_shim/__init__.py"}
"""The file that defines the version."""

WRITTEN = re.findall(r'__version__ = "(.*)"', (ROOT / "agent_shim/__init__.py").read_text())[0]
"""The version in the checkout. Tests may run with an installed build, whose version may include the commit."""
NEXT = WRITTEN.removesuffix(".dev0")

BY_HAND = {
    "README.md": r"(?:shim:|/v|stemcell-|cpi-|is )(\d+\.\d+\.\d+)",
    "docs/cpi.md": r"(?:kubernetes-cpi|bosh-stemcell)-(\d+\.\d+\.\d+)",
    "docs/kubernetes.md": r"agent-shim[ :](\d+\.\d+\.\d+)",
    "deploy/monitoring/kustomization.yaml": r"ref=v(\d+\.\d+\.\d+)",
}
"""Files in which the version is repeated by hand, with patterns for the lines that contain it."""

MEASURED = {"docs/performance.md", "docs/pictures/status.json", "docs/pictures/status.svg"}
"""Files with recorded output, which contains the version from the time of the recording. They are not updated for a
release.
"""


def test_package_version_is_read_from_the_source_code() -> None:
    """``pyproject.toml`` must leave the version to ``hatch_build.py``, which reads it from the module."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "hatch_build.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", WRITTEN)
    assert __version__.startswith(WRITTEN)


@pytest.mark.parametrize("name", BY_HAND)
def test_pages_contain_the_next_version(name: str) -> None:
    assert set(re.findall(BY_HAND[name], (ROOT / name).read_text())) == {NEXT}


def test_image_labels_have_the_version() -> None:
    """The Dockerfile repeats the version, because a label in a Dockerfile cannot contain the output of a program."""
    found = re.findall(r"(?:STEMCELL_VERSION:-|ARG VERSION=)([\w.-]+)", (ROOT / "Dockerfile").read_text())

    assert found == [WRITTEN.replace(".dev0", "-dev")] * 2


def test_release_has_a_changelog_heading() -> None:
    """Between releases, the first heading is ``Unreleased`` and the second heading names the previous version."""
    newest = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if WRITTEN == NEXT:
        assert newest[0] == WRITTEN
    else:
        assert newest[0] == "Unreleased"
        assert tuple(map(int, newest[1].split("."))) < tuple(map(int, NEXT.split(".")))


def test_no_unlisted_file_repeats_the_version() -> None:
    """Only lines that contain the project's name count, because other software may have the same version number."""
    own = re.compile(rf"agent[-_]shim[\"' =:@-]{{1,4}}{re.escape(NEXT)}|__version__ = ")
    found = {name for name, text in texts() if own.search(text) and not name.startswith("tests/")}

    assert found <= READERS | set(BY_HAND) | MEASURED | {"Dockerfile", "hatch_build.py"}


def test_repository_address_is_the_same_everywhere() -> None:
    home = hatch_build.HOME.removeprefix("https://github.com/")
    named = re.compile(r"(?:github\.com|ghcr\.io)/(?!you/)([\w-]+/agent-shim)\b")
    found = {name: set(named.findall(text)) for name, text in texts() if not name.startswith("tests/")}

    assert found["README.md"]
    assert {name: homes for name, homes in found.items() if homes - {home}} == {}


def test_test_dependencies_include_the_demos_dependencies() -> None:
    """The tests use the demo's certificates and bus. The packages are listed twice, because in some tools a dependency
    group cannot refer to one of its project's extras.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert set(project["project"]["optional-dependencies"]["demo"]) <= set(project["dependency-groups"]["test"])
