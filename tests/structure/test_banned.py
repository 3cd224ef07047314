"""Calls that this program does not make, each with the place that may and the reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from tests.structure.source import Module, modules, uses

COMMANDS = frozenset(
    {"cli.check", "cli.commands", "cli.compile_release", "cli.monit", "cli.bpm", "cli.bpm_logs", "cli.try_release"}
)


@dataclass(frozen=True)
class Ban:
    """Names (and all below them) that only some places may use. A package stands for all its modules."""

    names: tuple[str, ...]
    why: str
    places: frozenset[str] = frozenset()

    def covers(self, name: str) -> bool:
        """Return True if a full name is one of this project or below one."""
        return any(name == banned or name.startswith(f"{banned}.") for banned in self.names)

    def allows(self, module: Module) -> bool:
        """Return True if ``module`` is one of the places."""
        return any(module.name == place or module.name.startswith(f"{place}.") for place in self.places)


WALL_CLOCK: Mapping[str, str] = {
    "edges.alerts": "created_at of an alert",
    "cli.commands": "the moment before which logs are not shown",
    "services.certificate_watch": "validity of a certificate",
    "host.clock": "the one place that knows all clocks",
    "core.log": "stamps of log lines",
    "supervisor.history": "stamps of events",
}
"""Modules that may read the wall clock, and for which stamp."""

BROAD: Mapping[str, str] = {
    "edges.bus.nats": "whatever the client library raises, the bus is tried again",
    "host.daemon_thread": "whatever the work raises is raised where it is waited for",
    "actions.dispatch": "a bug in an action becomes an exception reply, not the end of the agent",
    "core.keep_running": "a part of the agent that fails disturbs no other",
    "core.lean_imports": "a library that fails with stand-ins is imported whole",
    "actions.tasks": "the lane outlives whatever a task raises",
}
"""Modules that may catch any exception. The line itself must also carry a comment."""

BANS = (
    Ban(
        ("asyncio.subprocess", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
        "loses exit codes and waits for inherited pipes: use host.process",
    ),
    Ban(
        ("os.fork", "os.forkpty", "os.posix_spawn", "os.posix_spawnp", "pty", "multiprocessing", "subprocess"),
        "only host makes processes",
        frozenset(
            {"host", "bulk.compression", "bulk.copytree", "cli.render", "cli.try_release"}
        ),  # in a worker. Ruby, for which a user waits
    ),
    Ban(("os.kill", "os.killpg", "signal.pidfd_send_signal"), "only host sends signals", frozenset({"host"})),
    Ban(("os.system", "os.popen"), "a shell reads the string"),
    Ban(("pickle", "marshal", "shelve", "eval", "exec"), "runs what it reads"),
    Ban(
        ("importlib.import_module", "__import__"),
        "hides an import from the floor test",
        frozenset({"core.lean_imports"}),
    ),
    Ban(("print",), "the daemon speaks through logging", COMMANDS | {"bulk.worker"}),
    Ban(("time.sleep",), "holds the event loop", COMMANDS | {"host.job_cgroups"}),  # which blocks, and says so
    Ban(
        (
            "time.time",
            "time.time_ns",
            "datetime.datetime.now",
            "datetime.datetime.utcnow",
            "datetime.datetime.today",
            "datetime.date.today",
        ),
        "jumps: intervals are time.monotonic, stamps are for the places in WALL_CLOCK",
        frozenset(WALL_CLOCK),
    ),
)

EVERYTHING = frozenset({"Exception", "BaseException"})


def violations(module: Module) -> Iterator[str]:
    """Every banned thing in ``module``, with its line."""
    for name, line in sorted(set(uses(module)), key=lambda use: use[1]):
        for ban in BANS:
            if ban.covers(name) and not ban.allows(module):
                yield f"{module.name}:{line} uses {name}: {ban.why}"
    for node in module.nodes:
        if isinstance(node, ast.keyword) and node.arg == "shell" and not _is_false(node.value):
            yield f"{module.name}:{node.value.lineno} uses shell=: a shell reads the string"
        elif isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _ends_in_raise(node):
            if module.name not in BROAD:
                yield f"{module.name}:{node.lineno} catches everything: name what can happen"
            elif not re.search(r"#.*\w", re.sub(r"#\s*noqa:\s*\w+", "#", module.lines[node.lineno - 1])):
                yield f"{module.name}:{node.lineno} catches everything and does not say why on the line"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in EVERYTHING) for kind in kinds)


def _ends_in_raise(handler: ast.ExceptHandler) -> bool:
    """Tidies up and passes it on: that catches nothing."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_banned_names_are_unused() -> None:
    found = [wrong for module in modules().values() for wrong in violations(module)]

    assert found == []


def test_ban_exceptions_name_existing_modules() -> None:
    """A permission ends with the module that it was given to."""
    allowed = {place for ban in BANS for place in ban.places} | set(BROAD)

    assert allowed - NOT_YET <= set(modules())


NOT_YET = frozenset({"cli.monit"})
"""Modules that the lists speak of before they are written; it only shrinks."""


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("host.process", "import asyncio\nasyncio.subprocess.PIPE", "uses asyncio.subprocess.PIPE"),
        (
            "services.scripts",
            "from asyncio import create_subprocess_exec as run",
            "uses asyncio.create_subprocess_exec",
        ),
        ("services.scripts", "import os\nos.fork()", "scripts:2 uses os.fork: only host"),
        ("daemon.main", "import os\nasync def stop():\n    os.kill(1, 15)", "daemon.main:3 uses os.kill"),
        ("daemon.main", "from os import killpg", "uses os.killpg"),
        ("actions.agent", "import os as o\nsend = o.kill", "uses os.kill"),
        ("actions.agent", "import subprocess", "uses subprocess"),
        ("actions.agent", "def f():\n    from subprocess import run", "agent:2 uses subprocess.run"),
        ("host.process", "import os\nos.system('true')", "uses os.system"),
        ("host.process", "run('true', shell=True)", "uses shell="),
        ("actions.tasks", "import pickle", "uses pickle"),
        ("actions.tasks", "eval('1')", "uses eval"),
        ("actions.tasks", "import importlib\nimportlib.import_module('nats')", "hides an import"),
        ("actions.tasks", "print('x')", "uses print"),
        ("actions.tasks", "import time\ntime.sleep(1)", "holds the event loop"),
        ("actions.tasks", "import time\nat = time.time()", "uses time.time"),
        ("actions.tasks", "from datetime import datetime, UTC\ndatetime.now(UTC)", "uses datetime.datetime.now"),
        ("services.scripts", "try:\n    f()\nexcept Exception:\n    pass", "scripts:3 catches everything: name"),
        ("services.scripts", "try:\n    f()\nexcept:\n    pass", "scripts:3 catches everything: name"),
        (
            "services.scripts",
            "try:\n    f()\nexcept (OSError, BaseException) as e:\n    log(e)",
            "catches everything: name",
        ),
        ("actions.dispatch", "try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass", "does not say why"),
    ],
)
def test_use_of_a_banned_name_is_detected(name: str, text: str, complaint: str) -> None:
    """Each ban is one that can be violated."""
    found = list(violations(Module(name, text)))

    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("host.process", "import os, signal\nos.fork()\nos.killpg(1, 9)"),
        ("actions.tasks", "import time\nat = time.monotonic()"),
        ("actions.tasks", "class T:\n    def print(self): ...\nT().print()"),
        ("core.log", "import time\nat = time.time()"),
        ("cli.commands", "print('done')"),
        ("actions.tasks", "try:\n    f()\nexcept BaseException:\n    close()\n    raise"),
        ("actions.dispatch", "try:\n    f()\nexcept Exception:  # noqa: BLE001 a bug becomes a reply\n    pass"),
    ],
)
def test_code_without_banned_names_passes(name: str, text: str) -> None:
    assert list(violations(Module(name, text))) == []
