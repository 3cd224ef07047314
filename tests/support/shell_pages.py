"""Completion for bash, zsh and fish, and the manual page, from the parser of ``agent-shim``."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from typing import Final

from agent_shim.cli import commands
from agent_shim.core import errors
from tests.support.commands_page import arguments, parsers, usage

OWN_CODES: Final = {0: "Success, or yes.", 1: "No, or incomplete.", 2: "Usage."}
"""Exit codes of commands that are no error's."""

NAMES: Final = {"NAME": "name", "JOB": "job"}
"""Arguments that the running agent knows, and the member of ``status --json`` with the word."""

FILES: Final = {"FILE": "f", "MANIFEST": "f", "RELEASE": "f", "agent.json": "f", "DIR": "d"}
"""Arguments that are files or directories, as ``compgen`` calls them."""


# --- bash -------------------------------------------------------------------------------------------------------------

BASH: Final = """\
# Completion of agent-shim for bash. Made by `python -m tests.support.drawn`.
_agent_shim_members() {{
    local place=() number
    for ((number = 2; number < ${{#COMP_WORDS[@]}} - 1; number++)); do
        [ "${{COMP_WORDS[number]}}" = -b ] && place=(-b "${{COMP_WORDS[number + 1]}}")
    done
    "${{COMP_WORDS[0]}}" status --json "${{place[@]}}" 2>/dev/null |
        sed -n '/^  "processes": /,/^  ]/s/^      "'"$1"'": "\\(.*\\)",\\{{0,1\\}}$/\\1/p'
}}

_agent_shim() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} words="" kind=""
    if [ "$COMP_CWORD" = 1 ]; then
        words="{commands} --help --version"
    else
        case "${{COMP_WORDS[1]}} $before" in
{values}
            *)
                case "${{COMP_WORDS[1]}}" in
{options}
                esac
                ;;
        esac
    fi
    case $kind in
        name | job) words+=" $(_agent_shim_members "$kind")" ;;
        ?) [[ $word = -* ]] || compopt -o filenames ;;
    esac
    mapfile -t COMPREPLY < <(
        compgen -W "$words" -- "$word"
        case $kind in ?) compgen "-$kind" -- "$word" ;; esac
    )
}}

complete -F _agent_shim agent-shim
"""


def bash() -> str:
    """The script for ``bash-completion``, or to be sourced."""
    values, options = [], []
    for name, parser in parsers().items():
        offered, kind = ["--help"], ""
        for action in arguments(parser):
            if action.option_strings:
                offered += action.option_strings
                if action.nargs != 0:
                    pattern = " | ".join(f'"{name} {option}"' for option in action.option_strings)
                    values.append(f"            {pattern}) {_bash_value(action)} ;;")
            else:
                offered += map(str, action.choices or ())
                metavar = str(action.metavar)
                kind = NAMES.get(metavar, FILES.get(metavar, kind))
        offered += ["all"] * (name in commands.CHANGES)
        more = f" kind={kind}" if kind else ""
        options.append(f'                    {name}) words="{" ".join(offered)}"{more} ;;')
    return BASH.format(commands=" ".join(parsers()), values="\n".join(values), options="\n".join(options))


def _bash_value(action: argparse.Action) -> str:
    if action.choices:
        return f'words="{" ".join(map(str, action.choices))}"'
    return f"kind={FILES[str(action.metavar)]}" if action.metavar in FILES else ":"


# --- zsh --------------------------------------------------------------------------------------------------------------

ZSH: Final = """\
#compdef agent-shim
# Completion of agent-shim for zsh. Made by `python -m tests.support.drawn`.

_agent_shim_members() {{
    local -a found place
    (( ${{+opt_args[-b]}} )) && place=(-b ${{(Q)opt_args[-b]}})
    found=(${{(f)"$($program status --json $place 2>/dev/null |
        sed -n '/^  "processes": /,/^  ]/s/^      "'$1'": "\\(.*\\)",\\{{0,1\\}}$/\\1/p')"}} ${{@:2}})
    compadd -a found
}}

_agent_shim() {{
    local program=$words[1]
    local -a known
    known=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command known
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}

if [ "$funcstack[1]" = _agent_shim ]; then
    _agent_shim "$@"
else
    compdef _agent_shim agent-shim
fi
"""


def zsh() -> str:
    """The function for ``site-functions``, or to be sourced."""
    known, cases = [], []
    for name, parser in parsers().items():
        known.append(f"        '{name}:{_quoted(parser.description or '')}'")
        specs = [spec for action in arguments(parser) for spec in _zsh_specs(name, action)]
        cases.append(" \\\n            ".join([f"        {name}) _arguments", *specs, "'--help[show options]' ;;"]))
    return ZSH.format(commands="\n".join(known), cases="\n".join(cases))


def _zsh_specs(command: str, action: argparse.Action) -> Iterator[str]:
    value = "" if action.nargs == 0 else f":{_quoted(str(action.metavar or action.dest))}:{_zsh_value(command, action)}"
    if action.option_strings:
        for option in action.option_strings:
            yield f"'{option}[{_quoted(action.help or action.dest)}]{value}'"
    else:
        many = "*" if action.nargs in ("+", "*") else ":" if action.nargs == "?" else ""
        yield f"'{many}{value}'"


def _zsh_value(command: str, action: argparse.Action) -> str:
    metavar = str(action.metavar)
    if action.choices:
        return f"({' '.join(map(str, action.choices))})"
    if metavar in NAMES and not action.option_strings:
        return f"{{_agent_shim_members {NAMES[metavar]}{' all' if command in commands.CHANGES else ''}}}"
    return {"f": "_files", "d": "_files -/"}.get(FILES.get(metavar, ""), " ")


def _quoted(text: str) -> str:
    """Without the characters that end a part of a specification."""
    return re.sub(r"([:\[\]])", r"\\\1", text).replace("'", r"'\''")


# --- fish -------------------------------------------------------------------------------------------------------------

FISH: Final = """\
# Completion of agent-shim for fish. Made by `python -m tests.support.drawn`.
function __agent_shim_members
    set -l words (commandline -opc)
    set -l place
    if set -l number (contains -i -- -b $words)
        set place -b $words[(math $number + 1)]
    end
    $words[1] status --json $place 2>/dev/null |
        sed -n '/^  "processes": /,/^  ]/s/^      "'$argv[1]'": "\\(.*\\)",\\{{0,1\\}}$/\\1/p'
end

complete -c agent-shim -f
{lines}
"""


def fish() -> str:
    """The file for ``vendor_completions.d``, or to be sourced."""
    lines = [
        f"complete -c agent-shim -n __fish_use_subcommand -a {name} -d {_fish_quoted(parser.description or '')}"
        for name, parser in parsers().items()
    ]
    for name, parser in parsers().items():
        lines += [f"{_fish_of(name)} {words}" for action in arguments(parser) for words in _fish_words(name, action)]
    return FISH.format(lines="\n".join([*lines, "complete -c agent-shim -l help -d 'show options'"]))


def _fish_of(command: str) -> str:
    return f"complete -c agent-shim -n '__fish_seen_subcommand_from {command}'"


def _fish_words(command: str, action: argparse.Action) -> Iterator[str]:
    offered = ""
    metavar = str(action.metavar)
    if action.choices:
        offered = f" -a '{' '.join(map(str, action.choices))}'"
    elif metavar in NAMES and not action.option_strings:
        offered = f" -a '(__agent_shim_members {NAMES[metavar]}){' all' if command in commands.CHANGES else ''}'"
    elif metavar in FILES:
        offered = " -a '(__fish_complete_directories)'" if FILES[metavar] == "d" else " -F"
    if action.option_strings:
        names = " ".join(f"-{'l' if one.startswith('--') else 's'} {one.lstrip('-')}" for one in action.option_strings)
        value = "" if action.nargs == 0 else f" -x{offered}" if offered != " -F" else " -r -F"
        yield f"{names}{value} -d {_fish_quoted(action.help or '')}"
    elif offered:
        yield offered.strip()


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# --- the manual page --------------------------------------------------------------------------------------------------


def manual() -> str:
    """The page for ``man agent-shim``."""
    top = commands.parser()
    lines = [
        r".\" Made by `python -m tests.support.drawn`.",
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
    """Exit codes of errors, with the first sentences of their classes."""
    found: dict[int, list[str]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.ShimError) and "exit_code" in vars(kind):
            found.setdefault(kind.exit_code, []).append(inspect.cleandoc(kind.__doc__ or "").partition(". ")[0])
    found[errors.ShimError.exit_code] = ["A bug, or a failed boot."]
    return {code: " ".join(texts) for code, texts in found.items()}


def _roff(text: str) -> str:
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("\n", " ")
    return rf"\&{text}" if text.startswith((".", "'")) else text
