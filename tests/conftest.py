"""For all tests: the processes they start have the signals of a terminal, whatever started the tests."""

from __future__ import annotations

from agent_shim.host import process


def pytest_configure() -> None:
    """A run in the background ignores SIGINT, and so would every process that a test wants to interrupt."""
    process.default_signals()
