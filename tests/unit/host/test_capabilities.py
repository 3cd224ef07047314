"""Abilities of this process, from the kernel."""

from __future__ import annotations

import pytest

from agent_shim.host import capabilities
from agent_shim.host.capabilities import Privileges

STATUS = """Name:\tagent
CapInh:\t0000000000000000
CapEff:\t00000000a80425fb
CapBnd:\t0000020000000001
NoNewPrivs:\t1
Seccomp:\t2
Seccomp_filters:\t1
"""
DOCKER = (
    "CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE NET_RAW SYS_CHROOT MKNOD "
    "AUDIT_WRITE SETFCAP"
)


def test_status_is_read() -> None:
    """The default set of Docker by name; a bit that has no name yet by its number."""
    assert capabilities.parse_status(STATUS) == Privileges(
        effective=frozenset(DOCKER.split()),
        bounding=frozenset({"CHOWN", "41"}),
        no_new_privs=True,
        seccomp=True,
    )


def test_what_is_missing_is_off() -> None:
    """An empty text gives no privilege."""
    assert capabilities.parse_status("") == Privileges()


def test_a_mask_that_is_none_is_an_error() -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match="all of them"):
        capabilities.names("all of them")


def test_the_real_kernel_can_be_read() -> None:
    """The effective set is within the bounding set."""
    found = capabilities.privileges()

    assert found.effective <= found.bounding
