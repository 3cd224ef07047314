"""Habits of language that this project's prose avoids, found in code and docs and counted per file.

``python -m tests.structure.language`` lists the files with the most of them; with file names, every place; with
``--write``, lowers the figures in ``tests/data/language.txt`` to the current ones.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.structure.source import ROOT, texts

BASELINE: Final = ROOT / "tests/data/language.txt"

SHIPPED: Final = ("agent_shim/", "agent_shim_demo/", "kubernetes_cpi/", "cpi_release/", "stemcell_overlay/")
"""Directories whose strings are read by people: log lines, errors, help texts. Strings of tests are data."""

PASSED_OVER: Final = (
    "tests/data/",
    "docs/commands.md",
    "tests/structure/language.py",
    "tests/structure/test_language.py",
    "LICENSE",
)
"""Data, a page generated from help texts, the examples of this test, and words of others."""

HASH_COMMENTS: Final = frozenset({"", ".sh", ".toml", ".yml", ".yaml", ".service", ".cfg", ".ini", ".conf"})
"""Suffixes of files whose comments begin with ``#``."""


@dataclass(frozen=True)
class Habit:
    """One habit: how it is found, in which kinds of text, and the way out."""

    pattern: re.Pattern[str]
    instead: str
    kinds: frozenset[str] = frozenset({"docstring", "value", "comment", "string", "page"})


def _words(pattern: str) -> re.Pattern[str]:
    """Words in any case. A space stands for a line break as well."""
    return re.compile(rf"\b(?:{pattern})\b".replace(" ", r"\s"), re.IGNORECASE)


OPENING = r"(?:\A|(?<=[.!?:;]\s)|(?<=\n\n)|(?<=\| )|(?<=^- ))"
STATEMENT = r"(?![^.!?|]*\?)"

HABITS: Final[Mapping[str, Habit]] = {
    "opens with who or what": Habit(
        re.compile(rf"{OPENING}(?:Who|Whom|Whose|What|Whatever|Whoever)\b{STATEMENT}", re.MULTILINE),
        "begin with a verb, or with the noun if it is a value",
    ),
    "opens with of": Habit(
        re.compile(rf"{OPENING}Of\b(?! course| these| those)", re.MULTILINE), "name the thing first: `Bytes in use.`"
    ),
    "opens with whether": Habit(
        re.compile(r"\AWhether\b"), "a function: `Return …` or `True if …`", frozenset({"docstring"})
    ),
    "people": Habit(_words("nobody|somebody|anybody|whoever"), "the thing is the subject: `no process`, `the caller`"),
    "told": Habit(
        _words("(?:is|are|was|were|be|been|gets?) (?:also |only |then |not )?told|(?:tell|tells|telling) of"),
        "report, log, show, name",
    ),
    "what is": Habit(
        _words(r"what (?:is|are|was|were|has|had|stands|fails|comes|lies|ends|belongs|others?)\b(?![^.!?|]*\?)"),
        "the noun: `files that differ`, `the remaining processes`",
    ),
    "anew": Habit(_words("anew"), "again"),
    "begun": Habit(_words("(?:is|are|was|were|be|been) begun"), "started, restarted"),
    "had": Habit(_words("(?:is|are|was|were|be) (?:not )?to be had|(?:can|cannot|could|may) be had"), "available"),
    "stands in": Habit(
        _words("(?:stands?|stood) (?:in|on|at|below|above|before|behind|beside|there|twice|again)"),
        "is in, is listed in, precedes",
    ),
    "goes on": Habit(_words("(?:goes|went) on(?! the| a| to)"), "continues, resumes"),
    "for want of": Habit(_words("for want of"), "without, because of too little"),
    "of late": Habit(_words("of late"), "recently"),
    "who": Habit(
        _words(r"(?:to|for|by|from|of|with) who(?:ever)?\b(?![^.!?|]*\?)"), "the caller, the owner, the reader"
    ),
}


@dataclass(frozen=True)
class Text:
    """A piece of prose: its kind, its first line, its words."""

    kind: str
    line: int
    text: str


@dataclass(frozen=True)
class Finding:
    """A habit in a place."""

    line: int
    habit: str
    words: str


def findings(pieces: Iterator[Text]) -> Iterator[Finding]:
    """Every habit in every text."""
    for piece in pieces:
        text = _prose(piece.text)
        for name, habit in HABITS.items():
            if piece.kind in habit.kinds:
                for hit in habit.pattern.finditer(text):
                    start = text.rfind("\n", 0, hit.start()) + 1
                    line = piece.line + text.count("\n", 0, hit.start())
                    yield Finding(line, name, text[start:].partition("\n")[0].strip()[:100])


def _prose(text: str) -> str:
    """Without code spans, which are the words of others. Line breaks within a sentence become spaces of equal length.

    Lines are kept, so that a place can be named.
    """
    text = re.sub(r"``[^`]*``|`[^`\n]*`", lambda span: re.sub(r"[^\n]", "·", span[0]), text)
    return re.sub(r"(?m)^[ \t]+", "", text)


_STRING: Final = r"""\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
_STRING_OR_COMMENT: Final = re.compile(rf"(?:{_STRING})|#([^\n]*)", re.DOTALL)


def python(text: str, *, with_strings: bool) -> Iterator[Text]:
    """Docstrings of functions and modules, docstrings of values, comments, and strings of several words if wanted."""
    tree = ast.parse(text)
    seen: set[int] = set()
    for node in statements(tree):
        for number, statement in enumerate(getattr(node, "body", ())):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value
                if isinstance(value.value, str):
                    seen.add(id(value))
                    is_first = number == 0 and not isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.With)
                    yield Text("docstring" if is_first else "value", value.lineno, value.value)
    if with_strings:
        nodes = list(ast.walk(tree))
        passed_over = seen | {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                yield Text("string", node.lineno, "".join(parts))
            elif isinstance(node, ast.Constant) and id(node) not in passed_over and _is_prose(node.value):
                yield Text("string", node.lineno, str(node.value))
    yield from _joined(_comments(text))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all statements below it, outside first."""
    ahead = [node]
    for each in ahead:
        yield each
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            below = getattr(each, field, ())
            ahead += below if isinstance(below, list) else ()


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment. Tokens would take ten times as long."""
    line, last = 1, 0
    for found in _STRING_OR_COMMENT.finditer(text):
        if found[1] is not None:
            line, last = line + text.count("\n", last, found.start()), found.start()
            yield line, found[1].lstrip("#").strip()


def _is_prose(value: object) -> bool:
    return isinstance(value, str) and value.count(" ") > 1


def hashed(text: str) -> Iterator[Text]:
    """Comments of shell, TOML, YAML and units, where they have a line of their own."""
    lines = enumerate(text.splitlines(), 1)
    yield from _joined((number, line.strip().lstrip("#").strip()) for number, line in lines if re.match(r"\s*#", line))


def _joined(comments: Iterator[tuple[int, str]]) -> Iterator[Text]:
    """Comments on lines that follow each other are one text."""
    first, last, lines = 0, -1, list[str]()
    for number, line in comments:
        if number != last + 1 and lines:
            yield Text("comment", first, "\n".join(lines))
            lines = []
        first, last = (first if lines else number), number
        lines.append(line)
    if lines:
        yield Text("comment", first, "\n".join(lines))


def markdown(text: str) -> Iterator[Text]:
    """A page without headings, which may ask, code blocks, and tables of docstrings that are counted elsewhere."""
    without = re.sub(
        r"(?ms)^<!-- (floors|modules) -->$.*?^<!-- /\1 -->$|^ *```.*?^ *```",
        lambda block: "\n" * block[0].count("\n"),
        text,
    )
    yield Text("page", 1, re.sub(r"(?m)^#.*$", "", without))


def texts_of(name: str, text: str) -> Iterator[Text]:
    """The prose in a file, by the kind of file that it is."""
    suffix = Path(name).suffix
    if suffix == ".py" or (text.startswith("#!/") and "python" in text.partition("\n")[0]):
        return python(text, with_strings=name.startswith(SHIPPED))
    if suffix == ".md":
        return markdown(text)
    return hashed(text) if suffix in HASH_COMMENTS else iter(())


def files() -> Iterator[tuple[str, str]]:
    """Every text file of the project with its name, but those that are data or about language."""
    return ((name, text) for name, text in texts() if not name.startswith(PASSED_OVER))


def counted() -> dict[str, list[Finding]]:
    """Files that have some, and what they have."""
    return {name: found for name, text in files() if (found := list(findings(texts_of(name, text))))}


def allowed() -> dict[str, int]:
    """How many each file may still have. A merge may leave two lines for a file: the lower figure counts."""
    known: dict[str, int] = {}
    for line in BASELINE.read_text().splitlines():
        name, _, count = line.rpartition(" ")
        known[name] = min(int(count), known.get(name, int(count)))
    return known


def excess(now: Mapping[str, int], known: Mapping[str, int], there: frozenset[str]) -> dict[str, int]:
    """Files with more than they may have, and by how much.

    A file that was renamed brings its figure along: new names share what the names that are gone have left.
    """
    over = {name: count - known[name] for name, count in now.items() if name in known and count > known[name]}
    new = {name: count for name, count in now.items() if name not in known}
    left = sum(count for name, count in known.items() if name not in there)
    return over | (new if sum(new.values()) > left else {})


def main(argv: list[str]) -> int:
    """List files, or places in files. ``--write`` lowers the figures."""
    found = counted()
    names = [name for name in argv if not name.startswith("-")]
    for name in names:
        for one in found.get(name, ()):
            print(f"{name}:{one.line}: {one.habit} (instead: {HABITS[one.habit].instead}): {one.words}")
    if not names:
        for name, places in sorted(found.items(), key=lambda item: -len(item[1]))[:30]:
            print(f"{len(places):5} {name}")
        print(f"{sum(map(len, found.values())):5} in {len(found)} files")
    if "--write" in argv:
        known = allowed() if BASELINE.exists() else {name: len(places) for name, places in found.items()}
        there = frozenset(name for name, _ in files())
        if over := excess({name: len(places) for name, places in found.items()}, known, there):
            print(f"cannot write: these have more than before: {over}", file=sys.stderr)
            return 1
        BASELINE.write_text("".join(f"{name} {len(found[name])}\n" for name in sorted(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
