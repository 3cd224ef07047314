"""Stand-ins for stemcell programs that are not installed on this machine, or that would change this machine.

They are mounted over ``/usr`` in each agent's environment.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

_QUIET: Final = """#!/bin/sh
exit 0
"""
_CHPST: Final = """#!/bin/sh
while getopts u:U:b:e:/:n:l:L:m:d:o:p:f:c:r:t:vP012 option; do [ "$option" != u ] || user=$OPTARG; done
shift $((OPTIND - 1))
[ -n "$user" ] || exec "$@"
exec setpriv --reuid="${user%%:*}" --regid="$(id -g "${user%%:*}")" --init-groups "$@"
"""
_SUDO: Final = """#!/bin/sh
user=root
group=
while [ $# -gt 0 ]; do
    case $1 in
    -u) user=$2; shift 2 ;;
    -g) group=$2; shift 2 ;;
    --) shift; break ;;
    -*) shift ;;
    *) break ;;
    esac
done
exec setpriv --reuid="$user" --regid="${group:-$(id -g "$user")}" --init-groups env "$@"
"""
QUIET: Final = (
    *("sysctl", "modprobe", "insmod", "rmmod", "reboot", "shutdown", "poweroff", "halt", "apt-get", "service", "sv"),
    *(
        "systemctl",
        "initctl",
        "rsyslogd",
        "logrotate",
        "swapon",
        "swapoff",
        "blockdev",
        "hwclock",
        "ntpdate",
        "chronyc",
    ),
    *("update-ca-certificates", "monit-actions", "losetup", "mkfs", "mkfs.ext4", "mkfs.xfs", "auditctl", "augenrules"),
    *(
        "dmidecode",
        "setcap",
        "ethtool",
        "losetup",
        "dmsetup",
        "kexec",
        "telinit",
        "udevadm",
        "crontab",
        "resolvectl",
        "netplan",
        "iptables-restore",
        "ulimit",
    ),
)
_IP: Final = """#!/bin/sh
[ "$*" != "${*#*type dummy}" ] || exec /usr/libexec/ip "$@"
exec /usr/libexec/ip link add "$3" type bridge
"""
"""Creates a bridge when a dummy interface is requested, because some kernels do not support dummy interfaces."""
PROGRAMS: Final = dict.fromkeys(QUIET, _QUIET) | {"chpst": _CHPST, "sudo": _SUDO, "ip": _IP}


def put(above: Path, more: dict[str, str]) -> None:
    """Write all stand-ins to a directory, which becomes the upper layer of an overlay over ``/usr``."""
    (above / "libexec").mkdir(parents=True)
    shutil.copy(shutil.which("ip") or "", above / "libexec/ip")
    for place in ("bin", "sbin"):
        (above / place).mkdir(parents=True, exist_ok=True)
        for name, text in (more | PROGRAMS).items():
            (above / place / name).write_text(text)
            (above / place / name).chmod(0o755)
