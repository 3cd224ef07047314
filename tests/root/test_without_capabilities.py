"""Root that may not give files away: a container that was started with ``--cap-drop=all``."""

from __future__ import annotations

import pytest

from tests.root.conftest import Inside
from tests.support.machine import Machine

pytestmark = pytest.mark.root

POWERLESS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")

BOOT = "from agent_shim.daemon import boot\nawait boot.boot([boot.tree_step(Paths())])"


def test_boot_keeps_owners_it_may_not_give(box: Machine, inside: Inside) -> None:
    """The tree is made with its modes, all of it root's; that owners stay is said once."""
    assert inside(BOOT, *POWERLESS) is None
    assert box.run("stat -c '%a %U:%G' /var/vcap/data/sys/log /var/vcap/bosh /var/vcap/data/jobs").split("\n") == [
        "750 root:root",
        "700 root:root",
        "750 root:root",
        "",
    ]


def test_a_secret_is_readable_by_its_owner_alone(box: Machine, inside: Inside) -> None:
    """A file that could not be given to its group is readable by root alone as far as its mode goes."""
    script = """
from agent_shim.host import files
files.write_atomic(Paths().base / "secret", b"x", mode=0o600, owner="root:vcap")
files.chown(Paths().base / "secret", "vcap:vcap")
"""

    assert inside(script, *POWERLESS) is None
    assert box.run("stat -c '%a %U:%G' /var/vcap/secret") == "600 root:root\n"


def test_it_is_reported_once(inside: Inside) -> None:
    """Twenty directories are one line."""
    script = """
import logging
from agent_shim.daemon import boot
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("agent_shim.host.files").addHandler(handler)
boot.make_tree(Paths())
boot.make_tree(Paths())
return said
"""

    assert inside(script, *POWERLESS) == ["cannot change owners of files: this container lacks CAP_CHOWN"]


def test_job_can_be_installed(box: Machine, inside: Inside) -> None:
    """Bundles of the Director are unpacked, usable and owned by root."""
    script = """
from agent_shim.bulk import modes
job = Paths().base / "job"
(job / "bin").mkdir(parents=True)
(job / "bin/ctl").write_text("x")
modes.set_owners_and_modes("job", job, "root:vcap")
"""

    assert inside(script, *POWERLESS) is None
    assert box.run("stat -c '%a %U:%G' /var/vcap/job/bin/ctl") == "750 root:root\n"


def test_powerful_root_gives_files_away(box: Machine, inside: Inside) -> None:
    """With the capability owners are what they should be."""
    assert inside(BOOT) is None
    assert box.run("stat -c '%a %U:%G' /var/vcap/data/sys/log") == "750 root:vcap\n"
