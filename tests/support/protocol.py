"""Parses ``docs/protocol.md``: its actions and their examples."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs/protocol.md"

ANYTHING = "…"

Call = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Section:
    """A section of ``docs/protocol.md``, which documents one action."""

    method: str
    text: str

    @property
    def examples(self) -> list[Example]:
        blocks = re.findall(r"^```agent ?(\w*)\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)
        return [Example(self.method, number, kind, body) for number, (kind, body) in enumerate(blocks, 1)]


@dataclass(frozen=True)
class Example:
    """A dialogue in docs/protocol.md.

    ``kind`` says what the dialogue requires: a deployed job (``deployed``), an agent that runs as root on its own
    machine (``root``), or only a fresh agent ("").
    """

    method: str
    number: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.method}-{self.number}"

    @property
    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield each line's mark (``>``, ``<`` or ``=``) and text. The text includes the indented lines that continue
        it.
        """
        for line in re.sub(r"\n +", " ", self.text.strip()).splitlines():
            mark, _, rest = line.partition(" ")
            assert mark in ("<", ">", "="), line
            yield mark, rest

    async def play(self, call: Call, known: Mapping[str, Any]) -> None:
        """Send the dialogue's requests, and compare the replies with the documented ones."""
        names, reply = dict(known), {}
        for mark, text in self.lines:
            if mark == ">":
                reply = await call({"protocol": 3, "reply_to": "director.a.b.c", **_filled(text, names)})
                continue
            if mark == "=":
                task = reply.get("value")
                assert isinstance(task, dict), f"{reply} is no task"
                assert task["state"] == "running", f"{reply} is no task"
                while is_running(reply):
                    reply = await call({"method": "get_task", "arguments": [task["agent_task_id"]]})
            told = ANYTHING if text == ANYTHING else _filled(text, names)
            assert matches(told, reply, names), f"{reply}\nis not what is told:\n{told}"


def is_running(reply: dict[str, Any]) -> bool:
    value = reply.get("value")
    return isinstance(value, dict) and value.get("state") == "running" and "agent_task_id" in value


def matches(told: Any, value: Any, names: dict[str, Any]) -> bool:
    """Return True if ``value`` matches the documented value ``told``.

    A ``$NAME`` that occurs for the first time is bound to the value in its place.
    """
    if isinstance(told, dict) and isinstance(value, dict):
        more = ANYTHING in told
        wanted = {name: member for name, member in told.items() if name != ANYTHING}
        if not (wanted.keys() <= value.keys() if more else wanted.keys() == value.keys()):
            return False
        return all(matches(member, value[name], names) for name, member in wanted.items())
    if isinstance(told, list) and isinstance(value, list):
        return len(told) == len(value) and all(matches(*pair, names) for pair in zip(told, value, strict=True))
    if not isinstance(told, str):
        return type(told) is type(value) and bool(told == value)
    if told == ANYTHING:
        return True
    if told.startswith("$"):
        return bool(names.setdefault(told[1:], value) == value)
    pattern = ".*".join(re.escape(part) for part in told.split(ANYTHING))
    return isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) is not None


def _filled(text: str, names: Mapping[str, Any]) -> Any:
    def known(found: re.Match[str]) -> str:
        if found[1] not in names:
            return found[0]
        text = json.dumps(names[found[1]])
        return text[1:-1] if isinstance(names[found[1]], str) else text

    return json.loads(re.sub(r"\$([a-z_0-9]+)", known, text))


def sections() -> list[Section]:
    """Return the actions in docs/protocol.md, in the order in which they are listed there."""
    actions = PAGE.read_text().partition("\n## Actions\n")[2].partition("\n## ")[0]
    parts = re.split(r"^### `(\w+)`$", actions, flags=re.MULTILINE)
    return [Section(method, text) for method, text in zip(parts[1::2], parts[2::2], strict=True)]


def message(kind: str) -> dict[str, Any]:
    """Return the example message of this ``kind`` in docs/protocol.md: a ``request``, ``heartbeat`` or ``alert``."""
    _, found, rest = PAGE.read_text().partition(f"\n```json {kind}\n")
    assert found, f"the page shows no {kind}"
    document: dict[str, Any] = json.loads(rest.partition("\n```")[0])
    return document
