"""Extended regular expressions as monit knows them, turned into Python's. Pure.

The dialect is that of glibc's ``regcomp`` with ``REG_EXTENDED``: no escapes inside brackets, ``{`` and operators need
something to repeat, an unmatched ``)`` is a character, and ``^`` and ``$`` stand for the ends of the text alone.
"""

from __future__ import annotations

import re
from typing import Final

DEEPEST: Final = 50
"""Parentheses inside each other; deeper ones are no pattern anyone wrote."""

MOST: Final = 0x7FFF
"""The largest number of repetitions."""

_CLASSES: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r"\ \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": r"\ -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t-\r\ ",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}

_ANCHORS: Final = {"^": r"\A", "$": r"\Z"}
_ESCAPED_ANCHORS: Final = {
    "`": r"\A",
    "'": r"\Z",
    "b": r"\b",
    "B": r"\B",
    "<": r"\b(?=\w)",
    ">": r"\b(?<=\w)",
}
DIGITS: Final = 6

_REPEATS: Final = "*+?{"
_INTERVAL: Final = re.compile(r"\{([0-9]*)(?:(,)([0-9]*))?\}")


def compiled(pattern: str) -> re.Pattern[str]:
    """The Python pattern to ``search`` with; raises ``ValueError`` that says what is wrong."""
    translator = _Translator(pattern)
    found = translator.alternatives(0)
    try:
        return re.compile(found, re.DOTALL | re.ASCII)
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(str(exc)) from exc


class _Translator:
    """Reads a pattern from left to right; each method returns the Python for what it has read."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.groups = 0
        self.closed: set[int] = set()

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def take(self) -> str:
        char = self.peek()
        self.at += 1
        return char

    def alternatives(self, depth: int) -> str:
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} parentheses inside each other")
        # A branch knows the groups before the alternatives and its own; what follows knows all.
        known, after = self.closed, set[int]()
        branches: list[str] = []
        while not branches or self.peek() == "|":
            self.at += bool(branches)
            self.closed = set(known)
            branches.append(self.branch(depth))
            after |= self.closed
        self.closed = after
        return "|".join(branches)

    def branch(self, depth: int) -> str:
        found = ""
        while (char := self.peek()) and char != "|" and not (char == ")" and depth):
            if char in _REPEATS:
                raise ValueError(f"nothing to repeat before '{char}'")
            anchor = self.anchor()
            found += anchor or self.repeated(self.atom(depth))
        return found

    def anchor(self) -> str:
        """An anchor cannot be repeated; "" when there is none."""
        two = self.pattern[self.at : self.at + 2]
        found = _ANCHORS.get(two[:1]) or (_ESCAPED_ANCHORS.get(two[1:]) if two[0] == "\\" else "") or ""
        if found:
            self.at += 2 if two[0] == "\\" else 1
        return found

    def repeated(self, atom: str) -> str:
        while (char := self.peek()) and char in _REPEATS:
            atom = f"(?:{atom}){self.interval() if char == '{' else self.take()}"
        return atom

    def interval(self) -> str:
        match = _INTERVAL.match(self.pattern, self.at)
        if match is None or not (match[1] or match[2]):
            raise ValueError("a broken interval after '{'")
        self.at = match.end()
        low = int(match[1] or 0) if len(match[1]) < DIGITS else MOST + 1
        high = low if not match[2] else int(match[3]) if match[3] else low
        if low > high:
            raise ValueError(f"an interval from {low} to {high}")
        if high > MOST:
            raise ValueError(f"more than {MOST} repetitions")
        return match[0] if match[1] else "{0" + match[0][1:]

    def atom(self, depth: int) -> str:
        char = self.take()
        if char == "(":
            return self.group(depth)
        if char == "[":
            return self.bracket()
        if char == ".":
            return "."
        return self.escape() if char == "\\" else re.escape(char)

    def group(self, depth: int) -> str:
        self.groups += 1
        number = self.groups
        found = self.alternatives(depth + 1)
        if self.take() != ")":
            raise ValueError("'(' without ')'")
        self.closed.add(number)
        return f"({found})"

    def escape(self) -> str:
        char = self.take()
        if not char:
            raise ValueError("a backslash at the end")
        if char in "wWsS":
            return f"\\{char}"
        if char in "123456789":
            if int(char) not in self.closed:
                raise ValueError(f"'\\{char}' without a group before it")
            return f"(?:\\{char})"
        return re.escape(char)

    def bracket(self) -> str:
        negated = self.peek() == "^"
        self.at += negated
        found = ""
        first = True
        while first or self.peek() != "]":
            found += self.element(first=first)
            first = False
        self.take()
        return f"[{'^' if negated else ''}{found}]"

    def element(self, *, first: bool) -> str:
        """A class, a character or a range; only characters can be the ends of a range."""
        if not first and self.is_range():
            raise ValueError("a range without a beginning")
        members = self.one_class()
        low = "" if members else self.character()
        if not self.is_range():
            return members or re.escape(low)
        self.take()
        if members or self.one_class():
            raise ValueError("a class at the end of a range")
        high = self.character()
        if low > high:
            raise ValueError(f"a range from '{low}' to '{high}'")
        return f"{re.escape(low)}-{re.escape(high)}"

    def is_range(self) -> bool:
        """Whether a ``-`` comes that is not the last character."""
        return self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", "")

    def one_class(self) -> str:
        """``[:name:]`` or ``[=x=]``; "" when there is none."""
        if not self.pattern.startswith(("[:", "[="), self.at):
            return ""
        is_equal = self.pattern[self.at + 1] == "="
        name = self.named()
        if is_equal and len(name) == 1:
            return re.escape(name)
        if name not in _CLASSES or is_equal:
            raise ValueError(f"no class '{name}'")
        return _CLASSES[name]

    def character(self) -> str:
        """One character of a bracket expression, also as ``[.x.]``."""
        if self.pattern.startswith("[.", self.at):
            name = self.named()
            if len(name) != 1:
                raise ValueError(f"no character '{name}'")
            return name
        char = self.take()
        if not char:
            raise ValueError("'[' without ']'")
        return char

    def named(self) -> str:
        """What stands in ``[:name:]``, ``[=name=]`` or ``[.name.]``."""
        end = self.pattern.find(f"{self.pattern[self.at + 1]}]", self.at + 2)
        if end < 0:
            raise ValueError("'[' without ']'")
        name = self.pattern[self.at + 2 : end]
        self.at = end + 2
        return name
