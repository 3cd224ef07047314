"""Tests the container's host name, both when the agent has its own UTS namespace and when it does not."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.support.machine import CODE, Machine, machine

pytestmark = pytest.mark.root

RUNTIME = "runtime-1"
MOUNTED = "mount --bind /etc/hostname /etc/hostname"
LONG = "x" * 65


def evaluate(box: Machine, before: str, expression: str) -> list[str]:
    """Evaluate ``expression`` in a new UTS namespace. Return its value and the namespace's host name afterwards."""
    code = f"import socket; from agent_shim.host import hostname; print({expression}); print(socket.gethostname())"
    inside = f"hostname {RUNTIME}; {before}; cd {CODE}; exec {sys.executable} -c {shlex.quote(code)}"
    return box.run(f"echo {RUNTIME} >/etc/hostname; unshare --uts sh -c {shlex.quote(inside)}").splitlines()


@pytest.mark.parametrize(
    ("before", "name", "why"),
    [
        (":", "agent-1", ""),
        (MOUNTED, "agent-1", "the host name belongs to the container runtime"),
        (":", "two words", "two words is not a valid host name"),
        (":", LONG, f"{LONG} is not a valid host name"),
    ],
)
def test_agent_sets_a_valid_host_name_unless_the_runtime_owns_it(
    tmp_path: Path, before: str, name: str, why: str
) -> None:
    with machine(tmp_path) as box:
        said = evaluate(box, before, f"hostname.set_host_name({name!r})")

        named = RUNTIME if why else name
        assert said == [why, named]
        assert (box.root / "etc/hostname").read_text() == f"{named}\n"


def test_agent_without_its_own_uts_namespace_keeps_the_host_name(tmp_path: Path) -> None:
    """Without its own UTS namespace, the agent would change the name for every program on the machine."""
    with machine(tmp_path) as box:
        told = box.run(
            f"cd {CODE}; {sys.executable} -c 'from agent_shim.host import hostname; print(hostname.obstacle())'"
        )

    assert told == "the host name is that of the machine\n"
