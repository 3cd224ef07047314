"""Tests the errors in configuration documents, and the example in docs/configuration.md that sets all options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from agent_shim.core import config_check, settings

PAGE = Path(__file__).parents[3] / "docs/configuration.md"


class Inner(msgspec.Struct):
    level: Annotated[int, msgspec.Meta(le=9, description="a level up to 9")] = 0


class Outer(msgspec.Struct, rename="camel"):
    some_names: list[str] = []
    by_name: dict[str, Inner] = {}
    maybe: Inner | None = None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"someNames": ["a", 1, 2]}, ["`$.someNames[1]`", "`$.someNames[2]`"]),
        (
            {"byName": {"a": {"level": 10}, "b": 3}},
            ["found 10, expected a level up to 9 - at `$.byName.a.level`", "b`"],
        ),
        ({"maybe": {"level": "x"}}, ["`$.maybe.level`"]),
        ({"maybe": None}, []),
        (3, ["`$`"]),
    ],
)
def test_config_check_reports_the_path_of_each_invalid_value(value: object, said: list[str]) -> None:
    found = list(config_check.mistakes(value, Outer))

    assert len(found) == len(said)
    for text, part in zip(found, said, strict=True):
        assert part in text


@pytest.mark.parametrize("value", [3, None, [], {"bynmae": 3}])
def test_config_check_lists_unknown_keys(value: object) -> None:
    assert len(list(config_check.unknown_keys(value, Outer))) == isinstance(value, dict)


def test_unknown_key_without_a_similar_key_gets_no_suggestion() -> None:
    assert config_check.did_you_mean("zzz", ["level"]) == ""


def test_suggested_name_with_dots_is_not_shown_as_a_nested_key() -> None:
    assert config_check.did_you_mean("web.2", ["web.1"]) == ": did you mean web.1?"


def test_documented_agent_json_example_sets_every_option() -> None:
    example = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)[0].encode()
    unknown: list[str] = []
    config = settings.parse_config(example, origin="the page", unknown=unknown)

    assert unknown == []
    assert config.infrastructure.settings.sources
    written = msgspec.json.decode(example)["AgentShim"]
    assert _paths(written) == set(config_check.all_keys(settings.ShimOptions))


def _paths(document: dict[str, object], path: str = "") -> set[str]:
    found = {f"{path}{name}" for name in document}
    for name, inner in document.items():
        if isinstance(inner, dict):
            found |= _paths(inner, f"{path}{name}.")
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"logLevel": "loud"}', 'unknown key `$.logLevel`: did you mean {"AgentShim": {"logLevel": \u2026}}?'),
        (
            b'{"AgentShim": {"password": "x"}}',
            'unknown key `$.AgentShim.password`: did you mean {"monit": {"password": \u2026}}?',
        ),
        (b'{"AgentShm": {}}', "unknown key `$.AgentShm`: did you mean AgentShim?"),
        (b'{"platform": {"Linux": {"UsePreformattedPersistentDisk": true}}, "Infrastructure": {"Settings": {}}}', None),
        (b"null", None),
    ],
)
def test_misplaced_option_is_reported_with_its_correct_place(text: bytes, found: str | None) -> None:
    unknown: list[str] = []
    settings.parse_config(text, origin="agent.json", unknown=unknown)

    assert unknown == ([] if found is None else [found])
