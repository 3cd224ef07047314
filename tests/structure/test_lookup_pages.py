"""Checks that tables that repeat facts from the code are complete: configuration keys and defaults, and exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest

from agent_shim.core import errors
from agent_shim.core.settings import ShimOptions
from tests.support.source import ROOT

SPELLED = {
    ("grace", "30.0"): "30",
    ("logs.period", "60.0"): "60",
    ("logFormat", ""): "text on a terminal, otherwise json",
    ("monit.http", ""): "127.0.0.1:2822",
    ("monit.mail", ""): "127.0.0.1:2825",
    ("monit.password", ""): "random",
    ("spec", ""): "none",
}
"""How the page shows the defaults that it writes differently from the code, keyed by the option and its default in the
code.
"""


def table(page: str, header: str) -> list[list[str]]:
    """Return the cells of the first table on the page whose header line is ``header``, without backticks."""
    rows = (ROOT / "docs" / page).read_text().partition(header + "\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def options(struct: type[msgspec.Struct], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield every option with its default. Options in a nested struct have dots in their names."""
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from options(field.type, f"{before}{field.encode_name}.")
        else:
            name, default = before + field.encode_name, field.default
            text = str(default).lower() if isinstance(default, bool) else str(default)
            yield name, SPELLED.get((name, text), text)


def test_configuration_page_lists_all_keys_and_defaults() -> None:
    rows = table("configuration.md", "| key | meaning | default |")

    assert {key: default for key, _, default in rows} == dict(options(ShimOptions))


def test_commands_page_lists_all_exit_codes() -> None:
    """The codes 0, 1 and 2 have no error class."""
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ShimError)]
    codes = {0, 1, 2} | {kind.exit_code for kind in classes}

    assert [int(code) for code, _ in table("commands.md", "| code | meaning |")] == sorted(codes)


@pytest.mark.parametrize("name", ["start", "doctor", "check"])
def test_commands_page_has_a_section_for_each_command(name: str) -> None:
    assert f"\n## {name}\n" in (ROOT / "docs/commands.md").read_text()
