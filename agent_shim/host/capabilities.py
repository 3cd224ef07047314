"""Reads this process's privileges, as reported by the kernel. This does not show the effects of seccomp and AppArmor,
which can only be found by trial (``privilege_probes``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

STATUS: Final = Path("/proc/self/status")

# Names from include/uapi/linux/capability.h. A name's position in the list is its bit number.
_IN_ORDER: Final = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
    "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN "
    "SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE "
    "MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)
NAMES: Final = _IN_ORDER.split()


class Privileges(NamedTuple):
    """Privileges of a process. Capabilities are named without the prefix (``SYS_ADMIN``), or with their number (``41``)
    if the name is unknown.
    """

    effective: frozenset[str] = frozenset()
    no_new_privs: bool = False
    seccomp: bool = False


def privileges() -> Privileges:
    """Read this process's privileges."""
    return parse_status(STATUS.read_text())


def parse_status(text: str) -> Privileges:
    """Parse ``/proc/PID/status``. A field that an old kernel does not report is empty or False."""
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    has_filter = fields.get("Seccomp", "0") != "0"
    return Privileges(names(fields.get("CapEff", "0")), fields.get("NoNewPrivs") == "1", has_filter)


def names(mask: str) -> frozenset[str]:
    """Return the names of the capabilities in a hexadecimal mask. Raises ``ValueError`` for any other text."""
    bits = int(mask, 16)
    numbers = [number for number in range(bits.bit_length()) if bits & (1 << number)]
    return frozenset(NAMES[number] if number < len(NAMES) else str(number) for number in numbers)
