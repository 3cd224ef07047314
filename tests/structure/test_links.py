"""Checks that links in pages lead to existing files and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.source import ROOT, texts

PAGES = sorted(ROOT / name for name, _ in texts() if name.endswith(".md"))
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")


def anchors(page: str) -> set[str]:
    """Return the fragments that link to a page's headings: the headings in lower case, with hyphens instead of spaces
    and without other punctuation.
    """
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(path: Path, text: str) -> Iterator[str]:
    """Yield a page's links whose targets do not exist."""
    for link in _LINK.findall(_FENCE.sub("", text)):
        name, _, fragment = link.partition("#")
        target = path if not name else (path.parent / name).resolve()
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (fragment and fragment not in anchors(target.read_text())):
            yield link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_pages_have_existing_targets(path: Path) -> None:
    assert list(dead(path, path.read_text())) == []


def test_dead_link_is_detected() -> None:
    page = "[a](docs/nothing.md) [b](#nothing) [c](docs/bosh.md#bosh-commands) [d](https://a.b/c)"

    assert list(dead(ROOT / "README.md", page)) == ["docs/nothing.md", "#nothing"]


def test_every_docs_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}

    assert [name for name in pages if f"({name}" not in index] == []


def test_every_alert_has_a_runbook() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    headings = re.findall(r"^## (AgentShim\w+)$", (ROOT / "docs/alerts.md").read_text(), re.MULTILINE)

    assert [rule["annotations"]["runbook_url"] for rule in alerts] == [
        f"docs/alerts.md#{rule['alert'].lower()}" for rule in alerts
    ]
    assert sorted(headings) == sorted(rule["alert"] for rule in alerts)
