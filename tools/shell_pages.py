"""Generates the bash, zsh and fish completion (with shtab) and the manual page from ``agent-shim``'s parser.

``hatch_build.py`` calls this module in pip's build environment, so it must not import anything that needs the agent's
libraries.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from typing import Final

import shtab

from agent_shim.cli import commands
from agent_shim.core import errors

OWN_CODES: Final = {0: "Success, or yes.", 1: "No, or incomplete.", 2: "Usage."}
"""Meanings of the exit codes that commands use without raising an error."""

NAMES: Final = {"NAME": "name", "JOB": "job"}
"""Arguments whose values the completion can get from a running agent.

Each is mapped to the member of ``status --json`` that contains the values.
"""

FILES: Final = frozenset({"FILE", "MANIFEST", "RELEASE", "agent.json"})
"""Arguments that are completed with file names."""


def page(name: str) -> str:
    """Return the content of a file: the manual page ``agent-shim.1``, or one of the scripts in ``commands.SHELLS``."""
    shells = {file: shell for shell, file in commands.SHELLS.items()}
    return completion(shells[name]) if name in shells else manual()


# --- the parser -------------------------------------------------------------------------------------------------------


def parsers(top: argparse.ArgumentParser | None = None) -> Mapping[str, argparse.ArgumentParser]:
    """Return each command's parser, in the order of ``--help``."""
    top = top or commands.parser()
    (below,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 argparse lists its arguments nowhere else
    found: Mapping[str, argparse.ArgumentParser] = below.choices
    return found


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return a command's arguments, without ``--help``."""
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]  # noqa: SLF001 argparse lists its arguments nowhere else


def usage(name: str, parser: argparse.ArgumentParser) -> str:
    """Return a command with all its arguments on one line."""
    return " ".join(["agent-shim", name, *map(_usage, arguments(parser))])


def _usage(action: argparse.Action) -> str:
    """Return one argument as it appears in a usage line."""
    written = " ".join(filter(None, [action.option_strings[0] if action.option_strings else "", placeholder(action)]))
    many = "..." if action.nargs in ("+", "*") else ""
    # Up to Python 3.13, argparse treats a positional argument that takes any number of values as required.
    is_required = action.required and action.nargs != "*"
    return f"{written}{many}" if is_required else f"[{written}{many}]"


def placeholder(action: argparse.Action) -> str:
    """Return the placeholder or the choices of an argument's value, or "" if it takes none."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    return str(name)


# --- completion -------------------------------------------------------------------------------------------------------

_MEMBER: Final = r"""sed -n '/^  "processes": /,/^  ]/s/^      "'$1'": "\(.*\)",\{0,1\}$/\1/p'"""

PREAMBLES: Final = {
    "bash": f"""\
_agent_shim_members() {{
  local place=() number
  for ((number = 2; number < ${{#COMP_WORDS[@]}} - 1; number++)); do
    [ "${{COMP_WORDS[number]}}" = -b ] && place=(-b "${{COMP_WORDS[number + 1]}}")
  done
  compgen -W "$("${{COMP_WORDS[0]}}" status --json "${{place[@]}}" 2>/dev/null | {_MEMBER}) $3" -- "$2"
}}
_agent_shim_name() {{ _agent_shim_members name "$1"; }}
_agent_shim_job() {{ _agent_shim_members job "$1"; }}
_agent_shim_name_or_all() {{ _agent_shim_members name "$1" all; }}""",
    "zsh": f"""\
_agent_shim_members() {{
  local -a found place
  (( ${{+opt_args[-b]}} )) && place=(-b ${{(Q)opt_args[-b]}})
  found=(${{(f)"$(agent-shim status --json $place 2>/dev/null | {_MEMBER})"}} $2)
  compadd -a found
}}
_agent_shim_name() {{ _agent_shim_members name }}
_agent_shim_job() {{ _agent_shim_members job }}
_agent_shim_name_or_all() {{ _agent_shim_members name all }}""",
    "fish": f"""\
function _agent_shim_members
  set -l words (commandline -opc)
  set -l place
  if set -l number (contains -i -- -b $words)
    set place -b $words[(math $number + 1)]
  end
  $words[1] status --json $place 2>/dev/null | {_MEMBER.replace("$1", "$argv[1]")}
  string split -n " " -- "$argv[2]"
end
function _agent_shim_name; _agent_shim_members name; end
function _agent_shim_job; _agent_shim_members job; end
function _agent_shim_name_or_all; _agent_shim_members name all; end""",
}
"""Shell functions that ask the running agent for completions. If the command line contains ``-b``, that option selects
the agent.
"""


def completion(shell: str) -> str:
    """Return the completion script for a shell. It can be sourced or installed in the shell's completion directory."""
    top = commands.parser()
    for name, parser in parsers(top).items():
        for action in arguments(parser):
            if action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.metavar in NAMES and not action.option_strings:
                function = f"_agent_shim_{NAMES[action.metavar]}{'_or_all' * (name in commands.CHANGES)}"
                action.complete = {"bash": function, "zsh": function, "fish": f"({function})"}  # type: ignore[attr-defined]
    return f"{shtab.complete(top, shell, preamble=PREAMBLES[shell])}\n"


# --- the manual page --------------------------------------------------------------------------------------------------


def manual() -> str:
    """Return the manual page for ``man agent-shim``."""
    top = commands.parser()
    lines = [
        '.TH AGENT-SHIM 1 "" "agent_shim" "Commands"',
        *(".SH NAME", rf"agent\-shim \- {_roff((top.description or '').rstrip('.').removeprefix('A '))}"),
        *(".SH SYNOPSIS", r".B agent\-shim", r"\fICOMMAND\fR [\fIARGUMENT\fR...]", ".br"),
        *(r".B agent\-shim \-\-version", ".SH DESCRIPTION", _roff(top.epilog or "")),
        ".SH COMMANDS",
    ]
    for name, parser in parsers().items():
        lines += [f".SS {name}", _roff(parser.description or ""), ".PP", rf"\fB{_roff(usage(name, parser))}\fR"]
        for action in arguments(parser):
            value = (
                "" if action.nargs == 0 else str(action.metavar or "|".join(map(str, action.choices or [action.dest])))
            )
            words = [" ".join(filter(None, [option, value])) for option in action.option_strings] or [value]
            lines += [".TP", rf"\fB{_roff(', '.join(words))}\fR", _roff(action.help or "") or r"\&"]
        lines += [".PP", "Examples:", ".PP", ".nf", ".RS 4"]
        lines += [_roff(line.strip()) for line in commands.EXAMPLES[name].strip().splitlines()] + [".RE", ".fi"]
    lines.append(".SH EXIT STATUS")
    for code, text in sorted({**OWN_CODES, **_codes()}.items()):
        lines += [".TP", str(code), _roff(text)]
    lines += [".SH SEE ALSO", r"The pages in docs/ of agent_shim: commands.md, configuration.md, troubleshooting.md."]
    return "\n".join(lines) + "\n"


def _codes() -> dict[int, str]:
    """Map each exit code to the first docstring sentence of every error class that causes it."""
    found: dict[int, list[str]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.ShimError) and "exit_code" in vars(kind):
            found.setdefault(kind.exit_code, []).append(inspect.cleandoc(kind.__doc__ or "").partition(". ")[0])
    found[errors.ShimError.exit_code] = ["A bug, or a failed boot."]
    return {code: " ".join(texts) for code, texts in found.items()}


def _roff(text: str) -> str:
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("\n", " ")
    return rf"\&{text}" if text.startswith((".", "'")) else text
