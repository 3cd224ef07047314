"""A short run of ``./dev fuzz``: foreign input is parsed or refused, without other effects."""

from __future__ import annotations

import random

import pytest

from agent_shim.core.errors import ShimError
from tools.chaos import fuzz


@pytest.mark.attack("a request is malformed, or has a value of another type")
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_mutated_input_is_read_or_refused(name: str) -> None:
    """Inputs that once broke something are the first."""
    found = list(fuzz.findings(fuzz.TARGETS[name], random.Random(7), lambda number: number >= 150))

    assert found == []


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_the_first_seed_is_read(name: str) -> None:
    """A target that refuses good input reads no other: archives in memory were refused before their first byte."""
    fuzz.TARGETS[name].read(fuzz.TARGETS[name].seeds[0])


def test_what_breaks_is_found() -> None:
    """The program can find something."""
    broken = fuzz.Target(lambda data: data.index(b"x"), (ShimError,), (b"x" * 20,))

    assert any("ValueError" in what for _, what in fuzz.findings(broken, random.Random(1), lambda number: number > 500))
