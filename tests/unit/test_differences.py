"""Tests that a failed comparison of structs names the field that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from tests.support.differences import differences


class Limits(msgspec.Struct):
    memory: int
    unit: str = "MB"


class Process(msgspec.Struct):
    name: str
    limits: Limits
    hooks: Sequence[Limits] = ()
    env: Mapping[str, str] = {}


def test_differences_lists_each_field_that_differs() -> None:
    left = Process("web", Limits(1), [Limits(1), Limits(2)], {"A": "1", "B": "2"})
    right = Process("web", Limits(2), [Limits(1), Limits(2, "GB"), Limits(3)], {"A": "1", "C": "3"})

    assert list(differences(left, right)) == [
        "limits.memory: 1 != 2",
        "hooks[1].unit: 'MB' != 'GB'",
        "hooks[2]: nothing != Limits(memory=3, unit='MB')",
        "env['B']: '2' != nothing",
        "env['C']: nothing != '3'",
    ]


def test_differences_compares_different_classes_as_a_whole() -> None:
    assert list(differences(Limits(1), {"memory": 1})) == ["value: Limits(memory=1, unit='MB') != {'memory': 1}"]


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: {"web": one}])
def test_failed_assertion_shows_the_field_that_differs(wrap: object) -> None:
    assert callable(wrap)
    with pytest.raises(AssertionError, match=r"limits\.memory: 1 != 2"):
        assert wrap(Process("web", Limits(1))) == wrap(Process("web", Limits(2)))
