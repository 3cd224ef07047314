"""Names in the code are words of the glossary, not the words that it rules out."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.structure.source import ROOT, texts

SHIPPED = ("agent_shim/", "kubernetes_cpi/")
ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| ([^|]*) \|$", re.MULTILINE)

OF_OTHERS = frozenset(
    {"object", "command", "event", "method", "check", "test", "server", "driver", "machine", "node", "lock", "timeout"}
    | {"setup", "mark", "tag", "level", "root", "world", "service", "job", "task", "daemon", "pid", "payload", "config"}
    | {"stats", "ping", "message", "response", "error response", "safe", "ignored", "shutdown", "shim", "mbus", "hook"}
    | {"helper", "master", "move", "tier", "pause", "spec file", "data disk", "fence", "take up"}
)
"""Words that the code needs for another thing, or for a protocol's own name: they are ruled out in prose only."""

KNOWN = {"mirror": 2, "patience": 10, "take over": 1, "trace": 29}
"""Names that still have such a word, at most."""


def ruled_out() -> dict[str, str]:
    """Words to avoid, with the right one."""
    found = {}
    for word, others in ROW.findall((ROOT / "docs/glossary.md").read_text()):
        for other in re.sub(r"\(.*?\)|, except.*", "", others).split(","):
            if (name := other.strip()) and word != "word" and name not in OF_OTHERS:
                found[name] = word.strip()
    return found


def names(text: str) -> Iterator[str]:
    """Names that a module binds."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def test_code_and_glossary_agree() -> None:
    words = ruled_out()
    found: Counter[str] = Counter()
    for file, text in texts():
        if file.startswith(SHIPPED) and file.endswith(".py"):
            for name in names(text):
                parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
                said = " ".join(part.removesuffix("s") for part in parts)
                found.update(word for word in words if f" {word} " in f" {said} ")

    assert {word: count for word, count in found.items() if count > KNOWN.get(word, 0)} == {}
    assert set(words) >= KNOWN.keys(), "the page is read"
