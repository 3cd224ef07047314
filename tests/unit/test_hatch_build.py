"""Tests the build hook: build versions, the wheel's README, and how the keeper is compiled."""

from __future__ import annotations

import re
from pathlib import Path

import hatchling.build
import pytest

import hatch_build
from tests.support.source import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def version_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the module that contains the version, in a directory that is not a git repository."""
    source = tmp_path / "__init__.py"
    source.write_text('__version__ = "0.3.0.dev0"\n__revision__ = ""\n')
    monkeypatch.setattr(hatch_build, "SOURCE", source)
    monkeypatch.setattr(hatch_build, "ROOT", tmp_path)
    monkeypatch.delenv("AGENT_SHIM_REVISION", raising=False)
    return source


@pytest.mark.parametrize(
    ("number", "commit", "named", "semantic"),
    [
        ("0.3.0.dev0", COMMIT, "0.3.0.dev0+g012345678", "0.3.0-dev.g012345678"),
        ("0.3.0.dev0", f"{COMMIT}-dirty", "0.3.0.dev0+g012345678.dirty", "0.3.0-dev.g012345678.dirty"),
        ("0.3.0.dev0", "", "0.3.0.dev0", "0.3.0-dev"),
        ("0.3.0", COMMIT, "0.3.0", "0.3.0"),
    ],
)
def test_version_of_a_build_between_releases_contains_the_commit(
    version_module: Path, monkeypatch: pytest.MonkeyPatch, number: str, commit: str, named: str, semantic: str
) -> None:
    version_module.write_text(f'__version__ = "{number}"\n__revision__ = ""\n')
    monkeypatch.setenv("AGENT_SHIM_REVISION", commit)

    assert (hatch_build.version(), hatch_build.semantic_version()) == (named, semantic)


def test_source_distribution_contains_its_commit(version_module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_module.write_text(f'__version__ = "0.3.0.dev0+g012345678"\n__revision__ = "{COMMIT}"\n')
    monkeypatch.setenv("AGENT_SHIM_REVISION", "f" * 40)

    assert (hatch_build.version(), hatch_build.revision()) == ("0.3.0.dev0+g012345678", COMMIT)


def test_wheel_readme_has_absolute_links_to_existing_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hatch_build, "revision", lambda: COMMIT)
    text = hatch_build.page((ROOT / "README.md").read_text())
    links = re.findall(r"\]\(([^)#]+)", text)

    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    ours = [link for link in links if COMMIT in link]
    assert [link for link in ours if not (ROOT / link.partition(f"{COMMIT}/")[2]).exists()] == []
    assert any("raw.githubusercontent.com" in link for link in ours if link.endswith(".svg"))


def test_wheel_build_needs_a_pypi_compiler_only_without_a_system_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    monkeypatch.setenv("PATH", str(tmp_path))
    assert hatch_build.compilers() == [[str(compiler)]]
    assert hatchling.build.get_requires_for_build_wheel() == []
    compiler.unlink()
    assert hatchling.build.get_requires_for_build_wheel() == ["ziglang"]
    assert hatchling.build.get_requires_for_build_sdist() == []


def test_build_fails_if_the_keeper_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")

    with pytest.raises(SystemExit, match=r"cannot compile agent_shim/host/keeper\.c: false "):
        hatch_build.build_keeper(tmp_path / "keeper")
    assert list(tmp_path.iterdir()) == []
