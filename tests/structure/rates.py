"""How often habits of language occur: in 10,000 words of docstrings and comments and of pages, in 100 names of tests.

``python -m tests.structure.rates`` prints the figures, with a directory those of another project; with ``--write`` it
lowers the limits in STYLE.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Final

from tests.structure.language import markdown, python
from tests.structure.source import ROOT, texts

OPENING: Final = r"(?:\A|(?<=[.!?]\s)|(?<=\n\n)|(?<=\| )|(?<=^- ))"

PATTERNS: Final[Mapping[str, re.Pattern[str]]] = {
    "`that of`, `those of`": re.compile(r"\b(?:that|those)\s+of\b", re.IGNORECASE),
    "`one` or `another` without a noun": re.compile(
        r"\bone\s+(?:that|which|who|of\s+which)\b|\banother\s+(?:is|has)\b", re.IGNORECASE
    ),
    "semicolons": re.compile(r";(?=\s|$)"),
    "colon before a clause": re.compile(r"\w: (?=[a-z])"),
    "opens with As, Nor, Also, It, Not, For, With": re.compile(
        rf"{OPENING}(?:As|Nor|Also|It|Not|For|With)\b", re.MULTILINE
    ),
}

RIDDLE: Final = re.compile(
    r"_(?:what|who|whom|whose|whoever|whatever|nobody|nothing|somebody|none|anew|told)(?:_|$)|_(?:that|those)_of_|_one_(?:that|which|who)_"
    r"|^test_(?:as|nor|also|it|not|for|with|of|without|even|only|but|so)_"
)
"""A name that is no plain fact: it opens without its subject, or its subject is a riddle."""

TESTS: Final = ("tests/", "chaos/", "benchmarks/", "comparison/")

NAMES: Final = "names of tests that are no plain fact, in 100"
COLUMNS: Final = ("code", "tests", "pages")
STYLE: Final = ROOT / "STYLE.md"

Figures = dict[str, dict[str, float]]


def rates(pieces: Iterable[str]) -> dict[str, float]:
    """Occurrences in 10,000 words of prose, without code spans."""
    words, found = 0, dict.fromkeys(PATTERNS, 0)
    for piece in pieces:
        text = re.sub(r"``[^`]*``|`[^`\n]*`", "x", piece)
        words += len(text.split())
        for name, pattern in PATTERNS.items():
            found[name] += len(pattern.findall(text))
    return {name: 10_000 * count / max(words, 1) for name, count in found.items()}


def names(text: str) -> list[str]:
    """Names of the tests of a module."""
    return re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE)


def measured(of: Iterable[tuple[str, str]], tests: tuple[str, ...] = TESTS) -> Figures:
    """The table: for each habit its rate in code, tests and pages. The last row is the share of test names."""
    code: list[str] = []
    ours: list[str] = []
    pages: list[str] = []
    found: list[str] = []
    for name, text in of:
        if name.endswith(".py"):
            is_test = name.startswith(tests) or "/tests/" in name or "/_tests/" in name
            (ours if is_test else code).extend(one.text for one in python(text, with_strings=False))
            found += names(text) if is_test else ()
        elif name.endswith(".md") and name != "CHANGELOG.md":
            pages += [one.text for one in markdown(text)]
    columns = dict(zip(COLUMNS, map(rates, (code, ours, pages)), strict=True))
    table = {habit: {column: rate[habit] for column, rate in columns.items()} for habit in PATTERNS}
    riddles = 100 * sum(bool(RIDDLE.search(name)) for name in found) / max(len(found), 1)
    return table | {NAMES: {"tests": riddles}}


def files_of(directory: Path) -> Iterator[tuple[str, str]]:
    """Python modules of another project."""
    for path in sorted(directory.rglob("*")):
        if path.suffix in (".py", ".md") and path.is_file():
            yield str(path.relative_to(directory)), path.read_text(errors="replace")


def row_of(habit: str) -> re.Pattern[str]:
    """Its row in STYLE.md: the first three figures are the limits of code, tests and pages."""
    return re.compile(rf"^\| {re.escape(habit)} \| ([\d.]*) \| ([\d.]*) \| ([\d.]*) \|", re.MULTILINE)


def limits(style: str) -> Figures:
    """The table of STYLE.md."""
    found: Figures = {}
    for habit in (*PATTERNS, NAMES):
        row = row_of(habit).search(style)
        assert row is not None, f"STYLE.md has no row for: {habit}"
        found[habit] = {column: float(text) for column, text in zip(COLUMNS, row.groups(), strict=True) if text}
    return found


def lowered(style: str, now: Figures) -> str:
    """The page with the present figures where they are lower. A figure never rises."""
    for habit, known in limits(style).items():
        cells = [f"{min(known[one], ceil(now[habit][one])):g}" if one in known else "" for one in COLUMNS]
        style = row_of(habit).sub(f"| {habit} | {' | '.join(cells)} |", style)
    return style


def main(argv: list[str]) -> int:
    """Print the figures, or write them."""
    if argv == ["--write"]:
        STYLE.write_text(lowered(STYLE.read_text(), measured(texts())))
        return 0
    for habit, row in measured(files_of(Path(argv[0])) if argv else texts()).items():
        print(f"{habit}: " + ", ".join(f"{column} {rate:.1f}" for column, rate in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
