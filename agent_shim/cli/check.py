"""``agent-shim check``: validate configuration files without regard to this machine.

Users, paths and modes do not matter; a ``depends on`` target that no given file defines is a warning, because it may
live in another job.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent_shim.core import settings
from agent_shim.core.errors import ConfigError
from agent_shim.supervisor.bpm import config
from agent_shim.supervisor.monit import parser

GOOD: Final = 0
USAGE: Final = 2
WRONG: Final = 78


def kind_of(name: str) -> str:
    """The kind of a file by its base name; "" if the name is ambiguous."""
    if name == "monit" or name.endswith((".monit", ".monitrc")):
        return "monit"
    if name == "bpm.yml" or name.endswith(".bpm.yml"):
        return "bpm"
    if name == "agent.json":
        return "agent"
    return "settings" if name.endswith(".json") else ""


def main(files: Sequence[Path], kind: str | None) -> int:
    """Check each file, as ``kind`` if its name is ambiguous; return the exit code of the worst."""
    kinds = {path: kind_of(path.name) or kind or "" for path in files}
    unknown = [path for path, found in kinds.items() if not found]
    if unknown:
        print(f"agent-shim: cannot check {unknown[0]}: its name does not say what it is (use --as)", file=sys.stderr)
        return USAGE
    wrong = False
    parsed: list[parser.MonitFile] = []
    for path, found in kinds.items():
        try:
            text = path.read_bytes()
            if found == "monit":
                parsed.append(parser.parse(_decoded(text, path), origin=str(path)))
            elif found == "bpm":
                config.parse(_decoded(text, path), origin=str(path))
            elif found == "agent":
                settings.parse_config(text, origin=str(path))
            else:
                settings.parse(text, origin=str(path))
        except (ConfigError, OSError) as exc:
            reason = str(exc) if isinstance(exc, ConfigError) else f"cannot read {path}: {exc.strerror}"
            print(reason, file=sys.stderr)
            wrong = True
        else:
            print(f"{path}: good ({found})")
    for problem in parser.problems(parsed):
        is_warning = problem.kind == "missing"
        print(f"{'warning: ' if is_warning else ''}{problem}", file=sys.stderr)
        wrong = wrong or not is_warning
    return WRONG if wrong else GOOD


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"cannot read {path}: it is no UTF-8 text ({exc.reason} at byte {exc.start})") from exc
