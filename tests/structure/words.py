"""The words of docs/: texts between spaces that have a letter, so no bars of tables and no plain numbers.

``python -m tests.structure.words`` prints them by page, the largest last, then their sum.
"""

from __future__ import annotations

import re
import sys
from typing import Final

from tests.structure.source import texts

MAX_WORDS: Final = 45_000


def by_page() -> dict[str, int]:
    """The number of words of each page."""
    return {
        name: sum(bool(re.search(r"[A-Za-z]", word)) for word in text.split())
        for name, text in texts()
        if name.startswith("docs/") and name.endswith(".md")
    }


def main() -> int:
    """Print the table."""
    pages = by_page()
    for name, count in sorted(pages.items(), key=lambda page: page[1]):
        print(f"{count:6} {name}")
    print(f"{sum(pages.values()):6} of at most {MAX_WORDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
