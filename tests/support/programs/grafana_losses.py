"""``grafana_losses.py FILE``: print the members of a dashboard that Grafana's schema does not contain.

Runs with the interpreter in ``.tools``. Grafana's library parses the file into its own types and serializes them again.
This loses members that are not in the schema, and a member of the wrong type causes an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder  # type: ignore[import-not-found, unused-ignore]
from grafana_foundation_sdk.cog.plugins import (  # type: ignore[import-not-found, unused-ignore]
    register_default_plugins,
)
from grafana_foundation_sdk.models.dashboard import Dashboard  # type: ignore[import-not-found, unused-ignore]


def losses(before: Any, after: Any, path: str = "$") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name, member in before.items():
            yield from losses(member, after.get(name), f"{path}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from losses(old, new, f"{path}[{number}]")
    elif before != after:
        yield path


def main() -> None:
    register_default_plugins()
    given = json.loads(Path(sys.argv[1]).read_text())
    read = Dashboard.from_json(given)
    sys.stdout.writelines(f"{path}\n" for path in losses(given, json.loads(JSONEncoder().encode(read))))


if __name__ == "__main__":
    main()
