"""Libraries are imported without what they do for nothing."""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent_shim.core import lean_imports

ROOT = Path(__file__).parents[2]

_WATCHED = """
import ssl
real, reads = ssl.SSLContext.load_default_certs, []
ssl.SSLContext.load_default_certs = lambda *args, **more: (reads.append(1), real(*args, **more))
import {module}
assert "aiohttp" in __import__("sys").modules
print(len(reads), ssl.create_default_context().verify_mode.name, len(reads))
"""


@pytest.mark.parametrize("module", ["agent_shim.bulk.transfer", "agent_shim.edges.bus.https"])
def test_no_authorities_are_read_before_somebody_wants_them(module: str) -> None:
    """Afterwards a context is again what it was."""
    program = _WATCHED.format(module=module)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert said.split() == ["0", "CERT_REQUIRED", "1"]


def test_metrics_bring_no_server() -> None:
    """The registry comes without the HTTP server, the client and the mail parser behind them."""
    script = (
        "import sys; before = set(sys.modules); import agent_shim.edges.metrics; print(*(set(sys.modules) - before))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())

    assert "prometheus_client.exposition" in loaded
    assert not loaded & {
        "gzip",
        "http",
        "http.client",
        "http.server",
        "email",
        "socketserver",
        "urllib.request",
        "wsgiref",
        "prometheus_client.metrics",
    }


def test_psutil_does_not_delay_the_first_answer() -> None:
    """It takes 10 ms and more: the first heartbeat needs it, the parts that come before the bus do not."""
    script = (
        "import sys, agent_shim.daemon.main as main; from agent_shim.supervisor.supervisor import Supervisor;"
        "from pathlib import Path; from agent_shim.core.paths import Paths;"
        "supervisor = Supervisor(Paths(Path('/nonexistent')), on_event=print);"
        "from agent_shim.edges import monit_http; monit_http.Api(print, Path('/nonexistent'));"
        "print('agent_shim.host.host_stats' in sys.modules, 'psutil' in sys.modules, supervisor.count())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert result.stdout.split() == ["True", "False", "0"]


_VALUES = """
import sys, agent_shim.daemon.main
classes = {each for name, module in list(sys.modules.items()) if name.startswith("agent_shim")
           for each in vars(module).values() if isinstance(each, type) and each.__module__.startswith("agent_shim")}
assert {"Check", "Request", "Timing"} <= {each.__name__ for each in classes}
dataclasses = [each.__name__ for each in classes if "__dataclass_fields__" in vars(each)]
print("typing_extensions" in sys.modules, *sorted(dataclasses))
"""


def test_values_of_the_daemon_are_structs() -> None:
    """A dataclass takes 11 KB more, and its definition a millisecond."""
    said = subprocess.run([sys.executable, "-c", _VALUES], capture_output=True, text=True, check=True).stdout

    assert said.split() == ["False"]


def test_monit_needs_the_standard_library_alone() -> None:
    """It is quick because it takes no lock, starts no event loop and imports no daemon."""
    known = "json.dumps(sorted({name.partition('.')[0] for name in sys.modules}))"
    code = f"import sys, json; import agent_shim.cli.monit; print({known})"

    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)

    assert set(json.loads(found.stdout)) & {"msgspec", "asyncio"} == set()


def test_a_probe_imports_little(tmp_path: Path) -> None:
    """Neither the parser of options nor dataclasses, paths, the event loop: they cost more than the question."""
    script = (
        "import sys; before = set(sys.modules); from agent_shim.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, *sorted(set(sys.modules) - before))"
    )
    argv = [sys.executable, "-S", "-c", script, "probe", "live", "-b", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=True)
    code, *loaded = done.stdout.split()

    assert code == "69"
    assert "is it running" in done.stderr
    assert {"agent_shim", "agent_shim.cli", "agent_shim.cli.probe"} <= set(loaded)
    assert not {"argparse", "dataclasses", "pathlib", "re", "asyncio", "msgspec", "agent_shim.cli.commands"} & set(
        loaded
    )


_LATE = """
import sys
from agent_shim.core import lean_imports
with lean_imports.without(late={"colorsys": {"one": lambda: 1}}):
    import colorsys
    from colorsys import one
before = "colorsys" in sys.modules
print(colorsys.one(), before, colorsys.rgb_to_hsv(0, 0, 1), "colorsys" in sys.modules)
import colorsys as real
print(hasattr(real, "one"), hasattr(colorsys, "nothing"))
"""


def test_a_late_module_is_imported_with_its_first_use() -> None:
    said = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True, check=True).stdout

    assert said.splitlines() == ["1 False (0.6666666666666666, 1.0, 1) True", "False False"]


def test_what_an_import_itself_uses_of_a_late_module_stays_loaded() -> None:
    script = (
        "import sys\nfrom agent_shim.core import lean_imports\n"
        "with lean_imports.without(late={'colorsys': {}}):\n    import colorsys\n    colorsys.rgb_to_hsv(0, 0, 1)\n"
        "print(sys.modules['colorsys'] is colorsys, 'rgb_to_hsv' in vars(sys.modules['colorsys']))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert said.split() == ["False", "True"]


class _Plain:
    first: int
    second: str = ""

    @property
    def both(self) -> str:
        return f"{self.first}{self.second}"


def test_a_struct_stands_for_a_dataclass() -> None:
    plain, frozen = lean_imports.as_struct(_Plain), lean_imports.as_struct(frozen=True)(_Plain)
    value = plain(1, second="a")
    value.second, value.more = "b", "c"

    assert (value.both, value.more, value == plain(1, "b"), value != plain(1)) == ("1b", "c", True, True)
    assert hash(frozen(first=1)) == hash(frozen(1))
    with pytest.raises(AttributeError):
        frozen(1).first = 2


class _Callable:
    async def method(self) -> None: ...

    def plain(self) -> None: ...

    @functools.wraps(plain)
    def wrapping(self) -> None: ...


async def _coroutine() -> None: ...


@pytest.mark.parametrize("name", ["iscoroutinefunction", "isfunction", "unwrap"])
@pytest.mark.parametrize(
    "function",
    [
        _coroutine,
        functools.partial(_coroutine),
        _Callable().method,
        functools.partial(functools.partial(_Callable().method)),
        _Callable().plain,
        _Callable.wrapping,
        _Callable,
        lambda: None,
        len,
        _coroutine.__name__,
    ],
)
def test_the_few_of_inspect_answer_as_inspect_does(name: str, function: object) -> None:
    assert lean_imports.FEW_OF_INSPECT[name](function) == getattr(inspect, name)(function)


class _Typed(_Callable):
    number: int


@pytest.mark.parametrize("cls", [_Typed, _Callable])
def test_types_of_members_are_those_of_the_class_alone(cls: type) -> None:
    assert lean_imports.FEW_OF_INSPECT["get_annotations"](cls) == inspect.get_annotations(cls)
