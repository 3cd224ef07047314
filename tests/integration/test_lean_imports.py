"""Modules that take a lot of memory or time to import are imported only when they are used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_ca_certificates_are_loaded_at_first_use(module: str) -> None:
    program = _WATCHED.format(module=module)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert said.split() == ["0", "CERT_REQUIRED", "1"]


def test_monit_command_imports_neither_msgspec_nor_asyncio() -> None:
    """Scripts call the command often, so it must start quickly. Both modules take a long time to import."""
    known = "json.dumps(sorted({name.partition('.')[0] for name in sys.modules}))"
    code = f"import sys, json; import agent_shim.cli.monit; print({known})"

    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)

    assert set(json.loads(found.stdout)) & {"msgspec", "asyncio"} == set()


def test_probe_imports_few_modules(tmp_path: Path) -> None:
    """Importing argparse, dataclasses, pathlib or asyncio would take longer than the probe itself."""
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


_STAND_IN = """
import sys
from pathlib import Path
from agent_shim.core import lean_imports
Path("{base}/library.py").write_text({text!r})
sys.path.insert(0, "{base}")
lean_imports.preload("library", "colorsys")
before = "colorsys" in sys.modules
import library
print(before, library.white(), "colorsys" in sys.modules)
"""


@pytest.mark.parametrize(
    "text",
    [
        "import colorsys\ndef white():\n    return colorsys.rgb_to_hsv(0, 0, 1)",
        "import colorsys\nWHITE = colorsys.rgb_to_hsv(0, 0, 1)\ndef white():\n    return WHITE",
    ],
    ids=["after the import", "by the import"],
)
def test_lazily_imported_module_is_imported_when_it_is_used(tmp_path: Path, text: str) -> None:
    script = _STAND_IN.format(base=tmp_path, text=text)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert said == "False (0.6666666666666666, 1.0, 1) True\n"
