"""Tests the wheel, installed in a separate environment that cannot import from this checkout."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import agent_shim
from hatch_build import revision, version
from tests.support.source import ROOT
from tools import shell_pages


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel in the same way as for the image."""
    out = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


def requirements(wheel: Path, extra: str = "") -> set[str]:
    """Return the distributions that pip would install with the wheel, according to their metadata.

    Raises an error if one of them is not installed in this environment.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        wanted = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    found: set[str] = set()
    todo = [(line, extra) for line in wanted]
    while todo:
        line, asked = todo.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": asked}):
            continue
        known = requirement.name.lower()
        if known not in found:
            found.add(known)
            todo += [(below, "") for below in importlib.metadata.requires(known) or []]
    return found


def installed(wheel: Path, place: Path, extra: str = "") -> Path:
    """Create an environment with the wheel and its requirements. Return the directory with its programs.

    pip installs only the wheel. The requirements become links to this environment's packages, so no registry is needed.
    """
    venv.create(place, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin/python"), "install", "--quiet", "--no-index"]
    nothing_of_ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([*pip, "--no-deps", "--disable-pip-version-check", str(wheel)], check=True, env=nothing_of_ours)
    (packages,) = place.glob("lib/python*/site-packages")
    for name in requirements(wheel, extra):
        for file in importlib.metadata.files(name) or []:
            target = (packages / file) if ".." not in file.parts else place / "bin" / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(str(file.locate())).resolve())
    return place / "bin"


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel without extras. Return the directory with its programs."""
    return installed(wheel, tmp_path_factory.mktemp("plain") / "env")


def run(program: Path, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """Run a program with an environment in which it finds neither our other programs nor this checkout.

    Return its output.
    """
    surroundings = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/", "LANG": "C.UTF-8"}
    done = subprocess.run([program, *words], capture_output=True, text=True, env=surroundings, cwd="/", timeout=120)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_wheel_contains_all_modules_and_no_tests(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    version = wheel.name.split("-")[1]

    packages = {"agent_shim", "kubernetes_cpi"}
    assert tops == packages | {f"agent_shim-{version}.data", f"agent_shim-{version}.dist-info"}
    for package in packages:
        here = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert here - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_every_module_in_the_wheel_can_be_imported(programs: Path) -> None:
    """The metadata must name all required libraries. Demo modules are excluded, because they need an extra."""
    code = (
        "import importlib, pkgutil, agent_shim, kubernetes_cpi\n"
        "for package in (agent_shim, kubernetes_cpi):\n"
        "    for one in pkgutil.walk_packages(package.__path__, package.__name__ + '.', onerror=lambda name: None):\n"
        "        if not one.name.endswith('__main__') and not one.name.startswith('agent_shim.demo.'):\n"
        "            importlib.import_module(one.name)\n"
        "print(agent_shim.__file__)"
    )

    assert str(programs.parent) in run(programs / "python", "-W", "error", "-c", code)


def test_wheel_installs_completion_and_manual(programs: Path) -> None:
    installed_files = {
        "bash": "bash-completion/completions/agent-shim",
        "zsh": "zsh/site-functions/_agent-shim",
        "fish": "fish/vendor_completions.d/agent-shim.fish",
    }
    share = programs.parent / "share"

    for shell, target in installed_files.items():
        wanted = shell_pages.completion(shell)
        assert wanted.isascii()
        assert (share / target).read_text() == wanted
        assert run(programs / "agent-shim", "completion", shell) == wanted
    assert (share / "man/man1/agent-shim.1").read_text() == shell_pages.manual()


def test_wheel_commands_run(programs: Path, tmp_path: Path) -> None:
    """`doctor` may exit with 1, depending on the machine, and `demo` only says which extra it needs."""
    monit = tmp_path / "web.monit"
    monit.write_text('check process web with pidfile /var/vcap/sys/run/web.pid\n  start program "/bin/true"\n')
    agent_shim = programs / "agent-shim"
    wanted = f"agent-shim {version()} ({revision()})\n"

    for words in (["--help"], ["help"], ["help", "logs"], ["logs", "--help"]):
        assert run(agent_shim, *words).startswith("usage: agent-shim"), words
    run(agent_shim, "check", str(monit))
    assert "capabilities" in run(agent_shim, "doctor", "-b", str(tmp_path / "vcap"), codes=(0, 1))
    assert len(revision()) >= 40
    assert run(agent_shim, "--version") == wanted
    assert run(agent_shim, "version") == wanted
    assert run(programs / "python", "-m", "agent_shim", "--version") == wanted
    said = run(agent_shim, "demo", codes=(78,))
    assert "agent-shim[demo]" in said
    assert "Traceback" not in said


def test_wheel_installs_only_the_agent_shim_command(programs: Path) -> None:
    """On a workstation, the names `monit`, `bpm` and `bosh-agent` could hide other programs. The image has links with
    these names instead.
    """
    assert {path.name for path in programs.glob("*")} & {"agent-shim", "bosh-agent", "bpm", "monit"} == {"agent-shim"}
    for name in ("bosh-agent", "bpm", "monit"):
        (programs / name).symlink_to("agent-shim")
    try:
        assert run(programs / "bpm", "version") == f"{version()}\n"
        assert "usage: monit" in run(programs / "monit", "-h")
        for word in ("-h", "--help"):
            assert "usage: bosh-agent" in run(programs / "bosh-agent", word)
        for word in ("-v", "--version"):
            assert run(programs / "bosh-agent", word) == f"[Version] {version()} ({revision()})\n"
    finally:
        for name in ("bosh-agent", "bpm", "monit"):
            (programs / name).unlink()


@pytest.mark.slow
def test_demo_runs_from_the_wheel_with_the_demo_extra(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "env", "demo")

    assert "the agent ended with status 0" in run(programs / "agent-shim", "demo")


def test_daily_tests_run_the_code_in_the_wheel() -> None:
    unpacked = os.environ.get("AGENT_SHIM_UNPACKED_WHEEL")
    if unpacked is None:
        pytest.skip("only ./dev test unpacks the wheel")
    command = [sys.executable, "-c", "import agent_shim; print(agent_shim.__file__)"]
    started = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert Path(agent_shim.__file__).is_relative_to(unpacked)
    assert Path(started.strip()).is_relative_to(unpacked)
