"""Imports go down only, and each library stays where it belongs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping

import pytest

from tests.structure.source import PACKAGE, Module, imports, modules

FLOORS: Mapping[int, frozenset[str]] = {
    7: frozenset(
        {"cli", "commands", "probe", "monit_cli", "bpm_cli", "bpm_logs"}
        | {"demo", "check", "compile_cli", "doctor", "status_text", "terminal"}
    ),
    6: frozenset({"boot", "comeback", "daemon", "handback", "observed", "orderly", "running", "standalone", "worker"}),
    5: frozenset(
        {"bus", "heartbeat", "alerts", "metrics", "monit_http", "monit_text", "responder", "control", "asking"}
    ),
    4: frozenset({"dispatch", "actions"}),
    3: frozenset({"agent", "compilation", "release_tarball", "tasks"}),
    2: frozenset(
        {"supervisor", "bundles", "scripts", "compiler", "blobstore", "disks", "dns", "logs", "vitals", "users"}
        | {"bosh_env", "certificates", "drift", "expiry", "fencing", "firewall", "joblogs", "mirror"}
        | {"resolver", "rotation", "settings_store", "spec_store", "sshd"}
    ),
    1: frozenset({"host"}),
    0: frozenset(
        {"", "errors", "paths", "wire", "settings", "spec", "digest", "imports", "lasting", "log", "safetext", "x509"}
    ),
}
"""What lives on which floor; a package stands for all its modules."""

STRANGERS = frozenset({2})
"""Floors whose modules do not know each other; on the others a neighbour may be imported."""

LIBRARIES: Mapping[str, frozenset[str]] = {
    "aiohttp": frozenset({"bus.https", "blobstore", "worker"}),
    "cryptography": frozenset({"demo"}),
    "httptools": frozenset({"responder", "supervisor.probes"}),
    "isal": frozenset({"host", "worker"}),
    "msgspec": frozenset(top for tops in FLOORS.values() for top in tops),
    "nats": frozenset({"bus.nats", "demo"}),
    "prometheus_client": frozenset({"metrics"}),
    "psutil": frozenset({"host", "vitals"}),
    "yaml": frozenset({"release_tarball", "supervisor.bpm"}),
    "yarl": frozenset({"blobstore"}),
}
"""Who may import what; a package stands for all its modules, nothing else from outside is allowed at all."""


def floor_of(name: str) -> int | None:
    """The floor of a module below the package; None when the table does not know it."""
    top = name.partition(".")[0]
    return next((floor for floor, tops in FLOORS.items() if top in tops), None)


def violations(module: Module, known: Collection[str]) -> Iterator[str]:
    """What is wrong with the imports of ``module``; ``known`` are the names of all modules."""
    here = floor_of(module.name)
    if here is None:
        yield f"{module.name} is on no floor: give it one in FLOORS"
        return
    for target, line in imports(module):
        library, _, inner = target.partition(".")
        if library == PACKAGE:
            name = _module_of(inner, known)
            there = floor_of(name)
            if there is None:
                yield f"{module.name}:{line} imports {name}, which is on no floor"
            elif there > here:
                yield f"{module.name}:{line} (floor {here}) imports {name} (floor {there})"
            elif there == here and here in STRANGERS and name.partition(".")[0] != module.top:
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
    """Modules that import each other in a circle, in order; empty when there is none."""
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


def test_imports_go_down() -> None:
    """No module imports from a floor above it, a stranger, or a library that belongs elsewhere."""
    found = [wrong for module in modules().values() for wrong in violations(module, modules())]

    assert found == []


def test_no_circles() -> None:
    """Neighbours on one floor do not import each other in a circle."""
    assert cycle(modules()) == []


KNOWN = {"", "errors", "host", "host.files", "supervisor", "supervisor.plan", "bundles", "agent", "daemon", "novelty"}


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("novelty", "", "novelty is on no floor"),
        ("errors", "from agent_shim import novelty", "imports novelty, which is on no floor"),
        ("errors", "import agent_shim.host.files", "errors:1 (floor 0) imports host.files (floor 1)"),
        ("host.files", "from agent_shim import agent", "imports agent (floor 3)"),
        ("host.files", "from .. import agent", "imports agent (floor 3)"),
        ("host.files", "def late():\n    from agent_shim.daemon import serve", "host.files:2"),
        ("bundles", "from agent_shim.supervisor.plan import Plan", "strangers to each other"),
        ("bundles", "from .supervisor import plan", "strangers to each other"),
        ("agent", "import nats.errors", "agent:1 imports nats"),
        ("bus.https", "from nats.aio import client", "imports nats"),
        ("dispatch", "import psutil", "imports psutil"),
        ("supervisor.plan", "import yaml", "imports yaml"),
        ("vitals", "from prometheus_client import Gauge", "imports prometheus_client"),
        ("bus.nats", "import aiohttp", "imports aiohttp"),
        ("host.files", "import requests", "imports requests"),
    ],
)
def test_violation_is_found(name: str, text: str, complaint: str) -> None:
    """Each rule of the house is one that can be broken."""
    found = list(violations(Module(name, text), KNOWN))

    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("daemon", "from agent_shim import __version__\nfrom agent_shim.agent import Agent"),
        ("supervisor.plan", "from agent_shim.errors import ConfigError\nfrom . import monitrc"),
        ("host.files", "import os.path\nfrom agent_shim.host import files"),
        ("bus.nats", "import nats.aio.client"),
        ("demo.broker", "import nats"),
        ("supervisor.bpm", "import yaml"),
        ("spec", "import msgspec"),
    ],
)
def test_good_import_passes(name: str, text: str) -> None:
    """What the house allows is not complained about."""
    assert list(violations(Module(name, text), KNOWN)) == []


def test_circle_is_found() -> None:
    """Two neighbours that need each other are named in order."""
    tasks = Module("tasks", "from agent_shim import agent")
    agent = Module("agent", "def late():\n    from agent_shim.tasks import Tasks")

    assert cycle({"tasks": tasks, "agent": agent}) == ["agent", "tasks", "agent"]
