"""Imports go down only, and each library stays where it belongs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping

import pytest

from tests.structure.source import DEMO, FLOORS, PACKAGE, Module, imports, modules

STRANGERS = frozenset({3})
"""Floors whose services do not know each other. On the others a neighbour may be imported."""

LIBRARIES: Mapping[str, frozenset[str]] = {
    "aiohttp": frozenset({"bulk.transfer", "edges.bus.https"}),
    "httptools": frozenset({"edges.http_server", "supervisor.network_checks"}),
    "isal": frozenset({"bulk"}),
    "msgspec": frozenset(FLOORS),
    "nats": frozenset({"edges.bus.link"}),
    "prometheus_client": frozenset({"edges.metrics"}),
    "psutil": frozenset({"host"}),
    "yaml": frozenset(
        {"cli.deployment", "cli.kubernetes", "cli.release_tarball", "cli.yaml_errors", "supervisor.bpm.config"}
    ),
    "yarl": frozenset({"bulk.transfer"}),
}
"""Allowed imports from outside. A package includes all its modules, and all others are forbidden."""


def floor_of(name: str) -> int | None:
    """The floor of a module. None for one outside the packages of FLOORS."""
    return FLOORS.get(name.partition(".")[0])


def service_of(name: str) -> str:
    """The service that a module is part of: a module or package directly below ``services``, or the supervisor."""
    return ".".join(name.split(".")[:2]) if name.startswith("services.") else name.partition(".")[0]


def violations(module: Module, known: Collection[str]) -> Iterator[str]:
    """Return forbidden imports of ``module``. ``known`` are the names of all modules."""
    here = floor_of(module.name)
    if here is None:
        yield f"{module.name} is on no floor: move it into a package of FLOORS"
        return
    for target, line in imports(module):
        library, _, inner = target.partition(".")
        if library == PACKAGE and inner.partition(".")[0] == DEMO:
            if module.name != "cli.commands":
                yield f"{module.name}:{line} imports {target}: only the command `demo` may"
        elif library == PACKAGE:
            name = _module_of(inner, known)
            there = floor_of(name)
            if there is None:
                yield f"{module.name}:{line} imports {name}, which is on no floor"
            elif there > here:
                yield f"{module.name}:{line} (floor {here}) imports {name} (floor {there})"
            elif there == here and here in STRANGERS and service_of(name) != service_of(module.name):
                yield f"{module.name}:{line} imports {name}: services of floor {here} are strangers to each other"
        elif library not in sys.stdlib_module_names and not _is_allowed(module.name, library):
            yield f"{module.name}:{line} imports {library}, which belongs elsewhere"


def _module_of(inner: str, known: Collection[str]) -> str:
    """The module that a dotted name below the package leads to: ``host.files.chown`` -> ``host.files``."""
    while inner and inner not in known:
        inner = inner.rpartition(".")[0]
    return inner


def _is_allowed(name: str, library: str) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in LIBRARIES.get(library, ()))


def cycle(of: Mapping[str, Module]) -> list[str]:
    """Modules that import each other in a circle, in order. Empty when there is none."""
    graph = {
        name: {
            found
            for target, _ in imports(module)
            if target.startswith(f"{PACKAGE}.")
            and (found := _module_of(target.removeprefix(f"{PACKAGE}."), of)) not in (name, "")
        }
        for name, module in of.items()
    }
    done: set[str] = set()

    def walk(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name not in done:
            for below in sorted(graph.get(name, ())):
                if circle := walk(below, [*above, name]):
                    return circle
            done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := walk(name, []))), [])


def test_modules_import_only_from_lower_floors() -> None:
    """No module imports from a floor above it, a foreign package, or a library that belongs elsewhere."""
    found = [wrong for module in modules().values() for wrong in violations(module, modules())]

    assert found == []


def test_modules_have_no_import_cycles() -> None:
    """Neighbours on one floor do not import each other in a cycle."""
    assert cycle(modules()) == []


KNOWN = frozenset(
    {"", "core.errors", "host", "host.files", "supervisor", "supervisor.plan", "services.bundles", "services.disks"}
    | {"services.disks.service", "actions.agent", "daemon.main", "novelty"}
)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("novelty", "", "novelty is on no floor"),
        ("core.errors", "from agent_shim import novelty", "imports novelty, which is on no floor"),
        ("core.errors", "import agent_shim.host.files", "core.errors:1 (floor 0) imports host.files (floor 1)"),
        ("host.files", "from agent_shim.actions import agent", "imports actions.agent (floor 4)"),
        ("host.files", "from ..actions import agent", "imports actions.agent (floor 4)"),
        ("host.files", "def late():\n    from agent_shim.daemon.main import serve", "host.files:2"),
        ("services.bundles", "from agent_shim.supervisor.plan import Plan", "strangers to each other"),
        ("services.bundles", "from .disks import service", "strangers to each other"),
        ("services.bundles", "from ..supervisor import plan", "strangers to each other"),
        ("actions.agent", "import nats.errors", "actions.agent:1 imports nats"),
        ("edges.bus.https", "from nats.aio import client", "imports nats"),
        ("actions.dispatch", "import psutil", "imports psutil"),
        ("supervisor.plan", "import yaml", "imports yaml"),
        ("services.vitals", "from prometheus_client import Gauge", "imports prometheus_client"),
        ("edges.bus.nats", "import aiohttp", "imports aiohttp"),
        ("host.files", "import requests", "imports requests"),
    ],
)
def test_forbidden_import_is_detected(name: str, text: str, complaint: str) -> None:
    """Each import rule is one that can be violated."""
    found = list(violations(Module(name, text), KNOWN))

    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("daemon.main", "from agent_shim import __version__\nfrom agent_shim.actions.agent import Agent"),
        ("supervisor.plan", "from agent_shim.core.errors import ConfigError\nfrom . import service"),
        ("services.disks.service", "from agent_shim.services.disks import markers"),
        ("host.files", "import os.path\nfrom agent_shim.host import files"),
        ("edges.bus.link", "import nats.aio.client"),
        ("supervisor.bpm.config", "import yaml"),
        ("core.spec", "import msgspec"),
    ],
)
def test_permitted_import_passes(name: str, text: str) -> None:
    assert list(violations(Module(name, text), KNOWN)) == []


def test_import_cycle_is_detected() -> None:
    """Two modules that need each other are named in order."""
    tasks = Module("actions.tasks", "from agent_shim.actions import agent")
    agent = Module("actions.agent", "def late():\n    from agent_shim.actions.tasks import Tasks")

    found = cycle({"actions.tasks": tasks, "actions.agent": agent})

    assert found == ["actions.agent", "actions.tasks", "actions.agent"]
