"""Generates the sections in docs/commands.md that list ``agent-shim``'s commands with their options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tools.shell_pages import arguments, parsers, placeholder, usage


def tables() -> str:
    """Return a section for each command, in the order of ``--help``.

    The ``-b`` option, which most commands have, is left out because the page describes it once.
    """
    return "\n".join(_section(name, parser) for name, parser in parsers().items())


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    found = arguments(parser)
    lines = [f"## {name}", "", f"`{usage(name, parser)}`", "", parser.description or "", ""]
    if rows := [_row(action) for action in found if "-b" not in action.option_strings]:
        lines += [*rows, ""]
    return "\n".join(lines)


def _row(action: argparse.Action) -> str:
    names = ", ".join(_spellings(action))
    return f"- {names}: {' '.join((action.help or '').split())}{_default(action)}"


def _spellings(action: argparse.Action) -> Iterator[str]:
    for option in action.option_strings or [""]:
        yield f"`{' '.join(filter(None, [option, placeholder(action)]))}`"


def _default(action: argparse.Action) -> str:
    """Return an argument's default, unless its help text already states it."""
    if action.default in (None, False, "", []) or action.required or "default" in (action.help or ""):
        return ""
    shown = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
    return f" (default: `{shown}`)"
