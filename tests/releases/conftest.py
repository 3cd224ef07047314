"""Jobs that behave like jobs in public releases run once in each environment.

One environment is this agent. The other is the Go agent with monit 5.2.5, which is used only if BOSH_AGENT and MONIT
name these programs. Each job's lifecycle is recorded, and its test makes the same assertions about all recordings.
Lifecycles run in parallel, with a monit cycle of two seconds.

If TEST_BASE_IMAGE is set, the only environment is our image, built on that base image. Each lifecycle then runs in a
container whose init has started the agent. No program in the image is replaced, so scripts run the base image's own
programs, and the agent checks services every ten seconds, as usual.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from agent_shim.demo.broker import nats_server
from tests.support import pods
from tests.support.machine import CODE
from tests.support.pods import Podman
from tools.comparison.__main__ import LIFE_LIMIT_S, live
from tools.comparison.plan import Plan, plan, written
from tools.comparison.releases import Checkout, Job

GO: Final = os.environ.get("BOSH_AGENT") and os.environ.get("MONIT")
BASE: Final = os.environ.get("TEST_BASE_IMAGE")
WORLDS: Final = ("image",) if BASE else ("shim", "go") if GO else ("shim",)
CYCLE_S: Final = 10 if BASE else 2
AT_ONCE: Final = 8 if BASE else 4
"""Number of lifecycles that run at the same time. More of them can run if monit's cycle has its usual length, because
they then spend most of the time waiting.
"""

IMAGE: Final = f"{pods.IMAGE}-releases"
CONTAINERFILE: Final = """
ARG IMAGE
FROM ${IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends python3-cryptography python3-yaml \
    && rm -rf /var/lib/apt/lists/*
"""
"""Builds our image with the packages that tools.comparison.life needs in addition to the agent's dependencies."""
PACKAGES: Final = "import sysconfig; print(sysconfig.get_path('purelib'))"

Phases = dict[str, dict[str, Any]]
Lives = dict[str, Future[dict[str, Any]]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that uses the ``life`` fixture once for each environment."""
    if "life" in metafunc.fixturenames:
        metafunc.parametrize("life", WORLDS, indirect=True)


def _begin(
    pool: ThreadPoolExecutor, test: pytest.Item, where: Path, play: Callable[[str, Plan, Path], dict[str, Any]]
) -> Future[dict[str, Any]]:
    marked = test.get_closest_marker("release")
    assert marked is not None, f"{test.name} names no release"
    options = dict(marked.kwargs)
    acts, trials = options.pop("acts", ()), options.pop("trials", ())
    made = plan(Checkout(where / "nothing"), Job(marked.args[0], "web", options.pop("files"), {}, ()))
    made.acts, made.trials = acts, trials
    place = where / test.name
    place.mkdir()
    world = test.callspec.params["life"]  # type: ignore[attr-defined]
    return pool.submit(play, world, made, place)


def _live_on_this_machine(world: str, made: Plan, place: Path) -> dict[str, Any]:
    return live(world, made, CYCLE_S, place)


def _build(podman: Podman, where: Path) -> None:
    image = pods.build(podman, pods.base_image(podman, where))
    podman(
        *("build", "--quiet", f"--build-arg=IMAGE={image}", "--tag", IMAGE, "--file", "-", str(CODE / "systemd")),
        stdin=CONTAINERFILE.encode(),
    )


def _live_in_image(podman: Podman, world: str, made: Plan, place: Path) -> dict[str, Any]:
    """Run the lifecycle in a container with the base image's Python and the agent's dependencies. Return the phases."""
    (place / "plan.json").write_text(written(made))
    mounts = (f"{place}:/mnt", f"{CODE}:{CODE}:ro", f"{nats_server()}:/usr/local/bin/nats-server:ro")
    options = ("--cap-add=all", "--network=none", "--hostname=instance", *(f"--volume={mount}" for mount in mounts))

    async def run() -> None:
        async with pods.running(podman, IMAGE, options=options) as container:
            packages = await container.exec("/opt/agent_shim/bin/python3", "-c", PACKAGES)
            variables = (f"--env=PYTHONPATH={CODE}:{packages.strip()}", f"--env=CYCLE={CYCLE_S}")
            life = ("python3", "-m", "tools.comparison.life", world, "/mnt/plan.json", "/mnt/result.json")
            limit = ("timeout", str(LIFE_LIMIT_S))
            await asyncio.to_thread(podman, "exec", *variables, f"--workdir={CODE}", container.name, *limit, *life)

    asyncio.run(run())
    document: dict[str, Any] = json.loads((place / "result.json").read_text())
    return document


@pytest.fixture(scope="session")
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Start all selected tests' lifecycles in parallel, and return their results."""
    where = tmp_path_factory.mktemp("releases")
    play = _live_on_this_machine
    if BASE:
        podman = pods.podman(where)
        _build(podman, where)
        play = functools.partial(_live_in_image, podman)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tests = [test for test in request.session.items if test.get_closest_marker("release")]
        yield {test.name: _begin(pool, test, where, play) for test in tests}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def life(request: pytest.FixtureRequest, lives: Lives) -> Phases:
    """Return the recorded phases of the test's lifecycle, keyed by their names."""
    result = lives[request.node.name].result()
    assert result["error"] == ""
    return {phase["name"]: phase for phase in result["phases"]}


@pytest.fixture(autouse=True)
def no_child_is_left() -> None:
    """Disable the check for remaining child processes, because other tests' lifecycles run at the same time."""
