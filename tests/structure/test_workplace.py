"""Checks that none of the project's files contains a path from the machine on which it was written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import ROOT, texts

HERE = str(Path(__file__).relative_to(ROOT))
NEIGHBOUR = re.compile(r"\.\./" + "shared")
HOMES = re.compile(r"/(home|Users)/(?!vcap\b)[a-z]" + r"|(?<![\w.])/root/")


def violations(name: str, text: str, root: Path) -> Iterator[str]:
    """Yield the lines in the file ``name`` that contain a path from this machine. ``root`` is the project directory."""
    here = re.compile(re.escape(str(root)) + r"(?![\w-])")
    for number, line in enumerate(text.splitlines(), 1):
        if here.search(line) or HOMES.search(line) or NEIGHBOUR.search(line):
            yield f"{name}:{number} {line.strip()}"


def test_no_file_contains_a_local_path() -> None:
    found = [wrong for name, text in texts() if name != HERE for wrong in violations(name, text, ROOT)]

    assert found == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("docs/a.md", "see ../" + "shared/design.md"),
        ("agent_shim/a.py", 'BASE = Path("/srv/checkout/agent_shim")'),
        ("dev", "cd /srv/checkout && ./dev test"),
        ("dev", "PATH=/home/jane/bin"),
        ("docs/a.md", "in /root/project"),
    ],
)
def test_local_path_is_detected(name: str, text: str) -> None:
    assert len(list(violations(name, text, Path("/srv/checkout")))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("users.py", "HOME = '/home/vcap'"),
        ("a.md", "/srv/checkouts and /var/vcap/data/root_log, rootfs/root/.bashrc, tests/root/test_x.py"),
    ],
)
def test_text_without_local_paths_passes(name: str, text: str) -> None:
    assert list(violations(name, text, Path("/srv/checkout"))) == []
