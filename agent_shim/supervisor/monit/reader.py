"""Reads a monit control file's tokens and locates errors. Does no I/O."""

from __future__ import annotations

from typing import Final

from agent_shim.supervisor.monit.lexer import KEYWORDS, Token, lex

MAX_DIGITS: Final = 36
"""Maximum number of digits in an integer. This is far more than monit's 32-bit integers can have."""

MAX_REAL: Final = 1e18
"""Maximum value of a number with a decimal point."""

MAX_SHOWN_CHARS: Final = 40
"""Maximum length of a wrong word that is quoted in an error."""


class MonitSyntaxError(ValueError):
    """An error in one statement. The message contains the position, what was found, and what was expected."""


class Reader:
    """Reads the tokens of one file's text. ``next`` is the next token, and ``kind`` is its kind. ``include`` statements
    are skipped and collected in ``includes``. In the methods, ``expected`` describes the expected token for an error.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        tokens = lex(text)
        self.includes = [token for token in tokens if token.kind == "INCLUDE"]
        self.tokens = [token for token in tokens if token.kind != "INCLUDE"] if self.includes else tokens
        self.at = 0
        self.next = self.tokens[0]
        self.kind = self.next.kind
        self.mistakes: list[str] = []
        if "\0" in text:  # reject the whole text
            at = text.index("\0")
            self.mistakes.append(str(self.error("text", Token("BAD", "a NUL byte", at, at + 1))))
            self.end()

    def end(self) -> None:
        """Skip the rest of the text."""
        self.at = len(self.tokens) - 1
        self.next = self.tokens[self.at]
        self.kind = self.next.kind

    def begins_line(self) -> bool:
        """Return True if the next token is the first on its line."""
        return not self.text[self.text.rfind("\n", 0, self.next.start) + 1 : self.next.start].strip()

    @property
    def second(self) -> Token:
        """The token after the next one."""
        return self.tokens[min(self.at + 1, len(self.tokens) - 1)]

    def skip(self) -> Token:
        """Consume the next token of any kind."""
        token = self.next
        if token.kind != "END":
            self.at += 1
            self.next = self.tokens[self.at]
            self.kind = self.next.kind
        return token

    def take(self, *kinds: str) -> Token | None:
        """Consume and return the next token if its kind is one of ``kinds``. Otherwise return None."""
        return self.skip() if self.kind in kinds else None

    def need(self, expected: str, *kinds: str) -> Token:
        """Consume and return the next token. Raises ``MonitSyntaxError`` unless its kind is one of ``kinds``."""
        if self.kind not in kinds:
            raise self.error(expected)
        return self.skip()

    def string(self, expected: str) -> str:
        """Read a word or a quoted string. A keyword must be quoted, and a path (quoted or not) is an error."""
        hint = f" (in quotes: {self.kind} is a keyword)" if self.kind in KEYWORDS else ""
        return self.need(expected + hint, "STRING").value

    def path(self, expected: str) -> str:
        """Read an absolute path, quoted or not."""
        return self.need(f"{expected}, beginning with '/'", "PATH").value

    def number(self, expected: str) -> int:
        """Read a whole number."""
        token = self.need(expected, "NUMBER")
        if len(token.value) > MAX_DIGITS:
            raise self.error(f"{expected} of {MAX_DIGITS} digits at most", token)
        return int(token.value)

    def figure(self, expected: str) -> float:
        """Read a number with or without a decimal point."""
        if self.kind != "REAL":
            return self.number(expected)
        token = self.skip()
        value = float(token.value)
        if value > MAX_REAL:
            raise self.error(f"{expected} below {MAX_REAL:.0e}", token)
        return value

    def timeout(self, default: int) -> int:
        """Read ``timeout N seconds``; no other unit is allowed. Return ``default`` if it is absent."""
        if not self.take("timeout"):
            return default
        seconds = self.number("a number of seconds")
        self.need("'seconds'", "second")
        return seconds

    def error(self, expected: str, token: Token | None = None) -> MonitSyntaxError:
        """Build an error that quotes ``token`` (default: the next one) and says what was expected instead."""
        token = token or self.next
        column = token.start - self.text.rfind("\n", 0, token.start)
        position = f"line {self.line(token)} column {column}"
        return MonitSyntaxError(f"{position}: found {self._found(token)}, expected {expected}")

    def line(self, token: Token) -> int:
        """Return the number of the line that contains the token, counted from 1."""
        return self.text.count("\n", 0, token.start) + 1

    def written(self, first: int) -> str:
        """Return the source text of the tokens from index ``first`` to the last one consumed. They are separated by
        single spaces, except that a newline follows a mail subject.
        """
        found = ""
        for token in self.tokens[first : self.at]:
            # A mail subject ends at the end of its line.
            found += self.text[token.start : token.end].strip() + ("\n" if token.kind == "SUBJECT" else " ")
        return found.rstrip()

    def _found(self, token: Token) -> str:
        """Describe a token for an error message."""
        if token.kind == "END":
            return "the end of the file"
        if token.kind == "BAD":
            return token.value
        text = self.text[token.start : token.end].strip()
        if text.startswith("#"):
            return "a comment without a line end"
        shown = text.partition("\n")[0][:MAX_SHOWN_CHARS]
        return f"'{shown}'" if shown == text else f"'{shown}...'"
