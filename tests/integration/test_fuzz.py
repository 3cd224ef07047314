"""A short run of ``./dev fuzz``: foreign input is parsed or refused, without other effects."""

from __future__ import annotations

import random

import pytest

from agent_shim.core.errors import ShimError
from chaos import fuzz


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_mutated_input_is_read_or_refused(name: str) -> None:
    """Inputs that once broke something are the first."""
    found = list(fuzz.findings(fuzz.TARGETS[name], random.Random(7), lambda number: number >= 150))

    assert found == []


def test_what_breaks_is_found() -> None:
    """The program can find something."""
    broken = fuzz.Target(lambda data: data.index(b"x"), (ShimError,), (b"x" * 20,))

    assert any("ValueError" in what for _, what in fuzz.findings(broken, random.Random(1), lambda number: number > 500))
