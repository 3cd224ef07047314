"""Jobs that behave like jobs of public releases. Each is run once in each environment.

One environment is this agent. The other is the Go agent with monit 5.2.5, and is used only if BOSH_AGENT and MONIT name
these programs. Each job's lifecycle is recorded, and a test makes the same assertions about both recordings. Lifecycles
run in parallel, with a monit cycle of two seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tools.comparison.__main__ import live
from tools.comparison.plan import plan
from tools.comparison.releases import Checkout, Job

AT_ONCE: Final = 4
CYCLE_S: Final = 2
GO: Final = os.environ.get("BOSH_AGENT") and os.environ.get("MONIT")
WORLDS: Final = ("shim", "go") if GO else ("shim",)

Phases = dict[str, dict[str, Any]]
Lives = dict[str, Future[dict[str, Any]]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that examines a recorded lifecycle once for each environment."""
    if "life" in metafunc.fixturenames:
        metafunc.parametrize("life", WORLDS, indirect=True)


def _begin(pool: ThreadPoolExecutor, test: pytest.Item, where: Path) -> Future[dict[str, Any]]:
    marked = test.get_closest_marker("release")
    assert marked is not None, f"{test.name} names no release"
    options = dict(marked.kwargs)
    acts, trials = options.pop("acts", ()), options.pop("trials", ())
    made = plan(Checkout(where / "nothing"), Job(marked.args[0], "web", options.pop("files"), {}, ()))
    made.acts, made.trials = acts, trials
    place = where / test.name
    place.mkdir()
    world = test.callspec.params["life"]  # type: ignore[attr-defined]
    return pool.submit(live, world, made, CYCLE_S, place)


@pytest.fixture(scope="session")
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Start all lifecycles of this test run immediately, so that they run in parallel."""
    where = tmp_path_factory.mktemp("releases")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tests = [test for test in request.session.items if test.get_closest_marker("release")]
        yield {test.name: _begin(pool, test, where) for test in tests}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def life(request: pytest.FixtureRequest, lives: Lives) -> Phases:
    """Return the recorded phases of the test's lifecycle, keyed by their names."""
    result = lives[request.node.name].result()
    assert result["error"] == ""
    return {phase["name"]: phase for phase in result["phases"]}


@pytest.fixture(autouse=True)
def no_child_is_left() -> None:
    """Disable the check for remaining child processes, because lifecycles of other tests run at the same time."""
