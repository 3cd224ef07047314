"""A short run of ``./dev fuzz``: foreign input is parsed or refused, without other effects."""

from __future__ import annotations

import random
from dataclasses import replace

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


@pytest.mark.parametrize(
    ("piece", "size"),
    [(b"1e308,", 1 << 20), (b"[],", 16 << 20), (b'"\\ud800",', 16 << 20), (b'"\xff",', 16 << 20)],
    ids=["exponents", "lists", "surrogates", "broken text"],
)
def test_the_largest_request_of_small_values_is_read_or_refused_soon(piece: bytes, size: int) -> None:
    """A megabyte comes over NATS, sixteen by HTTPS: each of these held the interpreter for more than a second."""
    data = b'{"method":"ping","arguments":[' + piece * (size // len(piece)) + b"0]}"

    assert list(fuzz.findings(replace(fuzz.TARGETS["envelope"], seeds=(data,)), random.Random(1), bool)) == []


def test_what_breaks_is_found() -> None:
    """The program can find something."""
    broken = fuzz.Target(lambda data: data.index(b"x"), (ShimError,), (b"x" * 20,))

    assert any("ValueError" in what for _, what in fuzz.findings(broken, random.Random(1), lambda number: number > 500))
