"""Every command line in docs/cpi.md runs exactly as it is documented.

bosh, kubectl and docker are replaced with stand-ins, which reject unknown options and missing files or objects. This
project's own commands are real.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cpi.calls import CpiCalls
from tests.cpi.test_commands import DirectorCli
from tests.support.source import ROOT

PAGE = (ROOT / "docs/cpi.md").read_text()
ELLIPSIS = "…"
"""The page's placeholder for additional command options."""
VALUES = {"LEVEL": "baseline", "CID": "vm-bosh-0123456789abcdef", " N ": " node-1 ", "DIGEST": "a" * 64}

DEV = f"""
task=$1; shift
case "$task" in
run) [ "$1" = python ] && shift && cd {ROOT} && exec {sys.executable} "$@";;
stemcell) exec {sys.executable} {ROOT}/stemcell_overlay/stemcell.py "$@" --out "$PWD/dist";;
cpi-release) [ "$1" = --version ] && : >dist/bosh-kubernetes-cpi-$2.tgz && exit;;
esac
exit 64
"""
KUBECTL = """
[ "$1" != -n ] || { [ "$2" = bosh ] || exit 1; shift 2; }
verb=$1; shift
case "$verb $*" in
"apply -k "*) exec test -f "$2/kustomization.yaml";;
"get secret bosh-cpi-token -o go-template={{.data.token|base64decode}}") printf token;;
'get secret bosh-cpi-token -o go-template={{index .data "ca.crt"|base64decode}}') printf ca;;
"get pods -L "*,* | "get services -l "*=* | "get storageclass" | "logs vm-"*) ;;
"delete secret bosh-cpi-token" | "taint node "*" "*=*:NoExecute) ;;
*) echo "error: unknown command: kubectl $verb $*" >&2; exit 1;;
esac
"""
DOCKER = """
case "$*" in
"build -t "*:*" ." | "push "*:*) ;;
*) exit 1;;
esac
"""


def fenced() -> list[str]:
    """Return the command lines of each code block. In a block with prompts, only the lines with a prompt are returned,
    because the others are output.
    """
    blocks = []
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", PAGE, re.DOTALL | re.MULTILINE):
        lines = [line.strip() for line in block.splitlines()]
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        if not language:
            unprompted = [] if any(line.startswith(("ok ", "limited ")) for line in lines) else lines
            blocks.append("\n".join(prompted or unprompted).replace(ELLIPSIS, ""))
    return blocks


def in_prose() -> list[str]:
    """Return the complete kubectl commands in running text, outside of code blocks."""
    return re.findall(r"`(kubectl (?:-n \S+ )?(?:apply|get|logs|taint) [^`]+)`", PAGE)


@pytest.fixture
def shell(cpi: CpiCalls, tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Return a function that runs a script in a directory like a clone of the repository, with every file that
    docs/cpi.md mentions.
    """
    director = DirectorCli(tmp_path)
    vm = cpi.create_vm()
    director.set_records(deployments={"zookeeper": {"instances": [[vm, []]], "vms": [{"cid": vm}]}})
    clone = tmp_path / "clone"
    (clone / "dist").mkdir(parents=True)
    (clone / "deploy").symlink_to(ROOT / "deploy")
    for name in ("bosh.yml", "zookeeper.yml", "token", "ca.crt", "home/.kube/config"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).touch()
    for name in ("bosh-kubernetes-cpi-0.3.0", "light-bosh-stemcell-0.3.0-warden-boshlite-ubuntu-noble-agent-shim"):
        (clone / f"dist/{name}.tgz").touch()
    for path, script in ((director.bin / "kubectl", KUBECTL), (director.bin / "docker", DOCKER), (clone / "dev", DEV)):
        path.write_text(f"#!/bin/sh{script}")
        path.chmod(0o755)
    environment = {**director.environment, "HOME": str(clone / "home")}

    def run(text: str) -> subprocess.CompletedProcess[str]:
        for mark, value in {**VALUES, "cpi.json": str(cpi.file)}.items():
            text = text.replace(mark, value)
        command = ["bash", "-euo", "pipefail", "-c", text]
        return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)

    return run


def test_documented_command_lines_are_found() -> None:
    """If the parser missed command lines, the tests that run them would still pass."""
    found = "\n".join([*fenced(), *in_prose()])
    lines = ["kubectl apply -k deploy/cpi/privileged", "docker push ", "bosh create-env ", "bosh -d zookeeper deploy "]
    lines += ["./dev stemcell --light", "kubernetes_cpi leftovers --config cpi.json --delete", "kubernetes_cpi doctor"]
    assert [line for line in lines if line not in found] == []


@pytest.mark.parametrize("text", [*fenced(), *in_prose()], ids=lambda text: text.splitlines()[0][:60])
def test_documented_command_lines_run(shell: Callable[[str], subprocess.CompletedProcess[str]], text: str) -> None:
    done = shell(text)

    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"


def test_invalid_documented_command_line_is_detected(shell: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    for text in ("bosh snapshots --json", "bosh instances --detail", "kubectl apply -k deploy/nothing"):
        assert shell(text).returncode != 0, text
