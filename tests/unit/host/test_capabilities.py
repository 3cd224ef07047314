"""Tests reading the capabilities of the agent's process from the kernel."""

from __future__ import annotations

import pytest

from agent_shim.host import capabilities
from agent_shim.host.capabilities import Privileges

STATUS = """Name:\tagent
CapInh:\t0000000000000000
CapEff:\t00000000a80425fb
NoNewPrivs:\t1
Seccomp:\t2
Seccomp_filters:\t1
"""
DOCKER = (
    "CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE NET_RAW SYS_CHROOT MKNOD "
    "AUDIT_WRITE SETFCAP"
)


def test_capabilities_are_read_from_the_status_file() -> None:
    assert capabilities.parse_status(STATUS) == Privileges(
        effective=frozenset(DOCKER.split()),
        no_new_privs=True,
        seccomp=True,
    )


def test_unknown_capability_is_shown_by_number() -> None:
    assert capabilities.names("20000000001") == {"CHOWN", "41"}


def test_missing_capability_fields_grant_nothing() -> None:
    assert capabilities.parse_status("") == Privileges()


def test_invalid_capability_mask_raises_an_error() -> None:
    with pytest.raises(ValueError, match="all of them"):
        capabilities.names("all of them")


def test_capabilities_of_the_real_kernel_can_be_read() -> None:
    found = capabilities.privileges()

    assert all(name in capabilities.NAMES or name.isdigit() for name in found.effective)
