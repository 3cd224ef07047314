"""Tests root without capabilities, as in a container that was started with ``--cap-drop=all``."""

from __future__ import annotations

import pytest

from tests.root.conftest import Inside
from tests.support.machine import Machine

pytestmark = pytest.mark.root

POWERLESS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")

BOOT = "from agent_shim.daemon import boot\nawait boot.boot([boot.tree_step(Paths())])"


def test_boot_without_capabilities_leaves_directories_owned_by_root(box: Machine, inside: Inside) -> None:
    """The agent must log only once that it cannot change owners. A file that it cannot give to the right group must be
    readable only by root.
    """
    script = """
import logging
from agent_shim.bulk import modes
from agent_shim.daemon import boot
from agent_shim.host import files
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("agent_shim.host.files").addHandler(handler)
await boot.boot([boot.tree_step(Paths())])
boot.make_tree(Paths())
files.write_atomic(Paths().base / "secret", b"x", mode=0o600, owner="root:vcap")
files.chown(Paths().base / "secret", "vcap:vcap")
job = Paths().base / "job"
(job / "bin").mkdir(parents=True)
(job / "bin/ctl").write_text("x")
modes.set_owners_and_modes("job", job, "root:vcap")
return said
"""
    assert inside(script, *POWERLESS) == ["cannot change owners of files: this container lacks CAP_CHOWN"]
    places = ("data/sys/log", "bosh", "data/jobs", "secret", "job/bin/ctl")
    modes = dict(zip(places, ("750", "700", "750", "600", "750"), strict=True))
    for place, mode in modes.items():
        assert box.run(f"stat -c '%a %U:%G' /var/vcap/{place}") == f"{mode} root:root\n", place


def test_boot_with_capabilities_changes_owners(box: Machine, inside: Inside) -> None:
    """This shows that only the missing capability makes the owners differ in
    ``test_boot_without_capabilities_leaves_directories_owned_by_root``.
    """
    assert inside(BOOT) is None
    assert box.run("stat -c '%a %U:%G' /var/vcap/data/sys/log") == "750 root:vcap\n"
