"""``./dev run python -m tests.support.drawn``: draw what the pages show of the code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from agent_shim.supervisor import state

PAGES: Final = Path(__file__).parents[2] / "docs"
DRAWN: Final[Mapping[tuple[str, str], Callable[[], str]]] = {
    ("architecture.md", "states"): lambda: f"```mermaid\n{state.mermaid()}```\n",
}
"""What stands between ``<!-- NAME -->`` and ``<!-- /NAME -->`` of a page."""


def with_drawings(page: str, text: str) -> str:
    """The text of a page with everything drawn anew; raises ``ValueError`` when a marker is missing."""
    for (where, name), draw in DRAWN.items():
        if where == page:
            begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
            before, found, rest = text.partition(begin)
            _, closed, after = rest.partition(end)
            if not (found and closed):
                raise ValueError(f"{page} has no place for {name}")
            text = before + begin + draw() + end + after
    return text


def main() -> int:
    for page in {page for page, _ in DRAWN}:
        path = PAGES / page
        path.write_text(with_drawings(page, path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
