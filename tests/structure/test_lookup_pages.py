"""Tables that repeat the code: keys and defaults in docs/configuration.md, exit codes in docs/commands.md."""

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
    ("logFormat", ""): "text on a terminal, else json",
    ("monit.http", ""): "127.0.0.1:2822",
    ("monit.mail", ""): "127.0.0.1:2825",
    ("monit.password", ""): "random",
    ("spec", ""): "none",
}
"""Key and default in the code, and the default as the page writes it."""


def table(page: str, header: str) -> list[list[str]]:
    """Return the cells of the first table with this header on the page, without backticks."""
    rows = (ROOT / "docs" / page).read_text().partition(header + "\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def options(struct: type[msgspec.Struct], before: str = "") -> Iterator[tuple[str, str]]:
    """Return every key with its default. Keys of members contain dots."""
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from options(field.type, f"{before}{field.encode_name}.")
        else:
            name, default = before + field.encode_name, field.default
            text = str(default).lower() if isinstance(default, bool) else str(default)
            yield name, SPELLED.get((name, text), text)


def test_configuration_page_lists_all_keys_and_defaults() -> None:
    """No option of ``AgentShim`` is missing from the page, and the page has no others."""
    rows = table("configuration.md", "| key | meaning | default |")

    assert {key: default for key, _, default in rows} == dict(options(ShimOptions))


def test_exit_codes_page_lists_all_exit_codes() -> None:
    """They are those of the error classes, and the three of every command."""
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ShimError)]
    codes = {0, 1, 2} | {kind.exit_code for kind in classes}

    assert [int(code) for code, _ in table("commands.md", "| code | meaning |")] == sorted(codes)


@pytest.mark.parametrize("name", ["start", "doctor", "check"])
def test_commands_page_has_each_command(name: str) -> None:
    """The page is generated. See ``test_drawn`` for when it is stale."""
    assert f"\n## {name}\n" in (ROOT / "docs/commands.md").read_text()
