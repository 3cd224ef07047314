"""Generates the sections of docs/commands.md, which list the commands of ``agent-shim`` with their options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from agent_shim.cli import commands


def tables() -> str:
    """Return a section for each command, in the order of ``--help``.

    The option ``-b``, which most commands have, is left out because the page describes it once.
    """
    return "\n".join(_section(name, parser) for name, parser in parsers().items())


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    found = arguments(parser)
    lines = [f"## {name}", "", f"`{usage(name, parser)}`", "", parser.description or "", ""]
    if rows := [_row(action) for action in found if "-b" not in action.option_strings]:
        lines += [*rows, ""]
    return "\n".join(lines)


def parsers(top: argparse.ArgumentParser | None = None) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order of ``--help``."""
    top = top or commands.parser()
    (below,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 argparse lists its arguments nowhere else
    found: Mapping[str, argparse.ArgumentParser] = below.choices
    return found


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a command, without ``--help``."""
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]  # noqa: SLF001 argparse lists its arguments nowhere else


def usage(name: str, parser: argparse.ArgumentParser) -> str:
    """Return a command with all its arguments on one line."""
    return " ".join(["agent-shim", name, *map(_usage, arguments(parser))])


def _usage(action: argparse.Action) -> str:
    """Return one argument as a usage line shows it."""
    written = " ".join(filter(None, [action.option_strings[0] if action.option_strings else "", _value(action)]))
    many = "..." if action.nargs in ("+", "*") else ""
    # Up to Python 3.13, argparse treats a positional argument that takes any number of values as required.
    is_required = action.required and action.nargs != "*"
    return f"{written}{many}" if is_required else f"[{written}{many}]"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    return str(name)


def _row(action: argparse.Action) -> str:
    names = ", ".join(_spellings(action))
    return f"- {names} {' '.join((action.help or '').split())}{_default(action)}"


def _spellings(action: argparse.Action) -> Iterator[str]:
    for option in action.option_strings or [""]:
        yield f"`{' '.join(filter(None, [option, _value(action)]))}`"


def _default(action: argparse.Action) -> str:
    """Return the default of an argument, unless its help text already states it."""
    if action.default in (None, False, "", []) or action.required or "default" in (action.help or ""):
        return ""
    shown = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
    return f" (default: `{shown}`)"
