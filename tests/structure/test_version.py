"""The version is written once, in ``agent_shim/__init__.py``; every other place reads it or is held to it here."""

from __future__ import annotations

import re
import tomllib

import pytest

from agent_shim import __version__
from tests.structure.source import ROOT, texts

READERS = {"agent_shim/__init__.py", "cpi_release/release.py", "stemcell_overlay/stemcell.py"}
"""The place of the version, and programs that read it there."""

BY_HAND = {
    "Dockerfile": r"STEMCELL_VERSION:-([^}]+)}",  # a label takes no output of a program
    "CHANGELOG.md": r"(?s)## Unreleased\n.*?\n## (\S+).*\Z",
    "docs/cpi.md": r"(?:kubernetes-cpi|bosh-stemcell)-(\d+\.\d+\.\d+)",
    "docs/kubernetes.md": r"agent-shim (\d+\.\d+\.\d+)",
}
"""Files that repeat the version, and where."""

MEASURED = {"docs/performance.md"}
"""Says which version it measured: the next one does not change that."""


def test_packaging_reads_the_version() -> None:
    """From the module that has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"] == {"path": "agent_shim/__init__.py"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


@pytest.mark.parametrize("name", BY_HAND)
def test_repetitions_are_equal(name: str) -> None:
    """The label of the image, the newest release of the changelog, examples of the docs."""
    assert set(re.findall(BY_HAND[name], (ROOT / name).read_text())) == {__version__}


def test_no_other_file_repeats_it() -> None:
    """As the version of this project."""
    own = re.compile(rf"agent[-_]shim[\"' =:@-]{{1,4}}{re.escape(__version__)}|__version__ = ")
    found = {name for name, text in texts() if own.search(text) and not name.startswith("tests/")}

    assert found <= READERS | set(BY_HAND) | MEASURED


def test_the_test_group_has_the_demo() -> None:
    """Tests use its certificates and its bus; a group cannot name an extra of its own project everywhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert set(project["project"]["optional-dependencies"]["demo"]) <= set(project["dependency-groups"]["test"])
