"""Tests a release's notes, checksums and sizes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hatch_build import semantic_version
from tests.support.source import ROOT
from tools.release import texts

CHANGELOG = "# Changelog\n\nAll.\n\n## Unreleased\n\n- new\n\n## 0.2.0\n\nFirst.\n\n### Agent\n\n- a\n"


def test_release_with_unreleased_changes_is_rejected() -> None:
    assert texts.notes(CHANGELOG, "0.3.0-dev.g1") == "# agent_shim 0.3.0-dev.g1, not a release\n\n- new\n"
    with pytest.raises(ValueError, match=r"no section 0.3.0; write one"):
        texts.notes(CHANGELOG, "0.3.0")
    with pytest.raises(ValueError, match=r"changes below Unreleased; move them to 0.2.0"):
        texts.notes(CHANGELOG, "0.2.0")


def test_release_notes_are_taken_from_the_changelog_section_of_the_release() -> None:
    text = CHANGELOG.replace("## Unreleased\n\n- new\n\n", "")

    assert texts.notes(text, "0.2.0") == "# agent_shim 0.2.0\n\nFirst.\n\n### Agent\n\n- a\n"


def test_version_without_release_notes_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"no section 9.9.9"):
        texts.notes("# Changelog\n\n## 0.2.0\n\n- a\n", "9.9.9")


def test_changelog_has_notes_for_the_current_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SHIM_REVISION", "0" * 40)
    assert "\n- " in texts.notes((ROOT / "CHANGELOG.md").read_text(), semantic_version())


def test_release_checksums_and_sizes_list_every_file(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"two")
    (tmp_path / "a").write_bytes(b"x" * 5_000_000)
    (tmp_path / texts.SUMS).write_text("old\n")
    lines = texts.sums(tmp_path).splitlines()

    assert [line.split("  ")[1] for line in lines] == ["a", "b"]
    assert lines[1].split("  ")[0] == hashlib.sha256(b"two").hexdigest()
    assert texts.sizes(tmp_path).splitlines()[0].split() == ["5.00", "MB", "a"]


def test_comparison_of_two_release_builds_names_differing_files() -> None:
    before, after = "1  same\n2  changed\n3  gone\n", "1  same\n9  changed\n4  come\n"

    assert texts.differing(before, after) == {"changed": "content", "come": "only after", "gone": "only before"}
    assert texts.differing(before, before) == {}
