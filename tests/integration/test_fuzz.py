"""A short run of ``./dev fuzz``, which checks that untrusted input is either parsed or rejected and has no other
effect.
"""

from __future__ import annotations

import random

import pytest

from agent_shim.core.errors import ShimError
from tools.chaos import fuzz


@pytest.mark.attack("a request is malformed, or has a value of the wrong type")
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_fuzzed_input_is_parsed_or_rejected(name: str) -> None:
    found = list(fuzz.findings(fuzz.TARGETS[name], random.Random(7), lambda number: number >= 150))

    assert found == []


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_first_seed_of_each_fuzzing_target_is_parsed(name: str) -> None:
    """A fuzzing target that rejects even its valid seed tests nothing."""
    fuzz.TARGETS[name].read(fuzz.TARGETS[name].seeds[0])


def test_fuzzer_reports_an_unexpected_exception() -> None:
    broken = fuzz.Target(lambda data: data.index(b"x"), (ShimError,), (b"x" * 20,))

    assert any("ValueError" in what for _, what in fuzz.findings(broken, random.Random(1), lambda number: number > 500))
