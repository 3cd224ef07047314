"""Verdicts about a container. Pure: facts in, findings out.

Advice has three forms if the places differ: for a pod, for a CPI outside of Kubernetes, whose
``cloud_properties`` are those of the Docker CPI (keys of Docker's HostConfig), and for options of docker and podman.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from agent_shim.cli.doctor.finding import CLOUD_PROPERTIES, GOOD, LIMITED, WRONG, Change, Finding
from agent_shim.host.capabilities import Privileges

MIB: Final = 1 << 20
GIB: Final = 1 << 30
VCAP_UID: Final = 1000
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - that very directory

NEEDED: Final = {
    "CHOWN": "files cannot be given to vcap",
    "DAC_OVERRIDE": "files of vcap cannot be written by the agent",
    "FOWNER": "modes of files of vcap cannot be set",
    "SETUID": "jobs cannot run as vcap",
    "SETGID": "jobs cannot run as vcap",
    "KILL": "processes of vcap cannot be stopped",
}
"""Capabilities that root needs to run jobs as another user."""
USEFUL: Final = {
    "NET_BIND_SERVICE": "jobs (and sshd) cannot listen on ports below 1024",
    "SYS_CHROOT": "sshd cannot confine itself: bosh ssh does not work",
    "AUDIT_WRITE": "log-ins are refused where PAM asks for an audit: bosh ssh may not work",
}
STRONG: Final = {
    "SYS_ADMIN": "no mounts: see mounts",
    "SYS_PTRACE": "what a process of another user left behind is found by its parent alone, not by its environment",
    "SYS_RESOURCE": "limits cannot be raised above those of the container",
    "NET_ADMIN": "jobs cannot set up interfaces, routes and packet filters",
    "NET_RAW": "jobs cannot ping",
    "IPC_LOCK": "jobs cannot keep secrets out of swap (vault, credhub)",
}
"""Capabilities that containers of CPIs usually have, and pods rarely."""

PRIVILEGED: Final = "privileged"
ROOT: Final = "root with few capabilities"
RESTRICTED: Final = "restricted: no root"

_SECURITY: Final = "securityContext"
_CPI: Final = CLOUD_PROPERTIES
_PRIVILEGED_BY_CPI: Final = "an engine that runs as root on the CPI's host and withholds nothing: the CPI asks for all"
"""The Docker and warden CPIs create privileged containers and ignore ``cloud_properties`` for this."""


def _capabilities(names: Collection[str], more: str = "") -> Change:
    listed = f"[{', '.join(names)}]"
    pod, options = f"{_SECURITY}.capabilities.add: {listed}{more}", " ".join(f"--cap-add={name}" for name in names)
    return Change(pod, cpi=f"{_PRIVILEGED_BY_CPI}{more}", engine=f"{options}{more}")


_DNS: Final = "dns of the network in the cloud-config"


def tier(*, is_root: bool, mounts: bool) -> str:
    """The kind of container in the table of docs/kubernetes.md."""
    return RESTRICTED if not is_root else PRIVILEGED if mounts else ROOT


def user(uid: int, *, is_mapped: bool, change_user_error: int, change_owner_error: int) -> Finding:
    """Judge the user by the errnos of changing to vcap and of a chown to it."""
    name = "root" if uid == 0 else f"user {uid}"
    where = ", of a user namespace" if is_mapped else ""
    if uid != 0:
        what = "a job can read what the agent knows; pre-start scripts that need root fail; no bosh ssh"
        follows = f"agent and jobs are one user: {what}"
        pod = f"{_SECURITY}.runAsUser: 0, where that is allowed"
        change = Change(pod, cpi="an image without USER", engine="--user=0")
        return Finding("user", LIMITED, f"{name}{where}", follows, change)
    if error := change_user_error or change_owner_error:
        lacking = "become another user" if change_user_error else "give files to another user"
        found = f"{name}{where}: cannot {lacking} ({os.strerror(error)})"
        change = _capabilities(["CHOWN", "SETGID", "SETUID"])
        return Finding("user", WRONG, found, "no job that runs as vcap starts", change)
    return Finding("user", GOOD, f"{name}{where}: can run jobs as another user")


def capabilities(found: Privileges, *, is_root: bool) -> Finding:
    """Judge the capabilities: each missing one disables a feature."""
    if not is_root:
        follows = USEFUL["NET_BIND_SERVICE"]
        return Finding("capabilities", LIMITED, "none, as for every user but root", follows, "none without root")
    missing = [name for name in (*NEEDED, *USEFUL) if name not in found.effective]
    absent = [name for name in STRONG if name not in found.effective]
    if missing:
        verdict = WRONG if any(name in NEEDED for name in missing) else LIMITED
        follows = "; ".join(dict.fromkeys({**NEEDED, **USEFUL}[name] for name in missing))
        return Finding("capabilities", verdict, f"without {', '.join(missing)}", follows, _capabilities(missing))
    if absent:
        shown = f"those the agent needs; without {', '.join(absent)}"
        follows = "; ".join(STRONG[name] for name in absent)
        where = "for jobs that need one of them"
        pod, cpi = f"{_SECURITY}.capabilities.add, {where}", f"{_PRIVILEGED_BY_CPI}, {where}"
        change = Change(pod, cpi=cpi, engine=f"--cap-add=NAME, {where}")
        return Finding("capabilities", LIMITED, shown, follows, change)
    return Finding("capabilities", GOOD, f"{len(found.effective)} of them, all that jobs ask for")


def privileges(found: Privileges) -> Finding:
    """Judge no_new_privs and the seccomp filter, which restrict every process."""
    known = (("no new privileges", found.no_new_privs), ("seccomp filter", found.seccomp))
    marks = [text for text, is_so in known if is_so]
    if found.no_new_privs:
        follows = "sudo, su and other setuid programs do nothing, for jobs and in bosh ssh"
        change = Change(
            f"{_SECURITY}.allowPrivilegeEscalation: true, where sudo is needed",
            cpi=f"{_CPI}: SecurityOpt without no-new-privileges, where sudo is needed",
            engine="no --security-opt=no-new-privileges, where sudo is needed",
        )
        return Finding("confinement", LIMITED, ", ".join(marks), follows, change)
    return Finding("confinement", GOOD, ", ".join(marks) or "none")


def mounts(bind_error: int, tmpfs_error: int) -> Finding:
    """Judge the errnos of a bind mount and a tmpfs."""
    if not bind_error and not tmpfs_error:
        return Finding("mounts", GOOD, "bind mounts and tmpfs work")
    tried = (("bind mount", bind_error), ("tmpfs", tmpfs_error))
    found = "; ".join(f"{what}: {os.strerror(error)}" for what, error in tried if error)
    follows = (
        "a persistent disk is shown by a link (scripts that ask `mountpoint /var/vcap/store` see none); jobs that "
        "mount (nfs volumes, garden) fail; what env.bosh wants in memory is on disk"
    )
    change = Change(
        f"{_SECURITY}.privileged: true, or mount the volume on /var/vcap/store itself",
        cpi=_PRIVILEGED_BY_CPI,
        engine="--privileged, or --volume=NAME:/var/vcap/store",
    )
    return Finding("mounts", LIMITED, found, follows, change)


def isolation(level: int, landlock: int, namespaces: Mapping[str, int]) -> Finding:
    """Judge isolation: ``level`` of bpm.yml processes, ``landlock`` the kernel's version, ``namespaces`` errnos."""
    can = [name for name, code in namespaces.items() if not code]
    found = f"level {level} (Landlock {landlock or 'missing'}; namespaces that can be made: {', '.join(can) or 'none'})"
    if level <= 2:
        return Finding("bpm isolation", GOOD, found)
    follows = "a process of bpm.yml can read the files of other jobs that vcap can read"
    change = "a node with Linux 5.13 or newer and Landlock, and a seccomp profile that allows it (RuntimeDefault does)"
    return Finding("bpm isolation", LIMITED, found, follows, change)


def cgroups(version: int, *, delegates: bool, memory: int | None, cpus: float | None) -> list[Finding]:
    """Judge cgroups: ``memory`` (bytes) and ``cpus`` are the limits of the container, None without one."""
    if version == 0:
        follows = "memory and processor in heartbeats are the host's; kills by the memory limit go unreported"
        pod, cpi = "mount /sys/fs/cgroup (read-only is enough)", "the property mount_cgroupfs of the CPI"
        change = Change(pod, cpi=cpi, engine="--volume=/sys/fs/cgroup:/sys/fs/cgroup:ro")
        return [Finding("cgroups", LIMITED, "not visible", follows, change)]
    how = "can be made below ours" if delegates else "read-only"
    follows = "limits.memory of bpm.yml is kept by a watchdog that looks once a second, limits.processes is not"
    visible = Finding("cgroups", GOOD, f"version {version}, {how}", "" if delegates else follows)
    texts = [f"memory {memory / MIB:.0f} MiB" if memory else "", f"{cpus:g} processors" if cpus else ""]
    limits = ", ".join(filter(None, texts)) or "none"
    if memory:
        return [visible, Finding("limits", GOOD, limits)]
    follows = "one job can take the memory of the whole machine; heartbeats tell the machine's memory"
    change = Change("resources.limits.memory", cpi=f"{_CPI}: Memory: BYTES", engine="--memory=SIZE")
    return [visible, Finding("limits", LIMITED, limits, follows, change)]


def open_files(hard: int, processes: int) -> Finding:
    """Judge the hard limits of jobs; a negative number means unlimited."""
    shown = [f"{'no limit' if value < 0 else value} {what}" for value, what in ((hard, "files"), (processes, "tasks"))]
    if 0 <= hard < 65536:
        follows = "jobs that want more open files get these (bpm.yml limits.open_files is often 65536 or 100000)"
        change = Change(
            "the default ulimits of the container runtime on the node (LimitNOFILE)",
            cpi=f"{_CPI}: Ulimits: [{{Name: nofile, Soft: 1048576, Hard: 1048576}}]",
            engine="--ulimit=nofile=1048576:1048576",
        )
        return Finding("job limits", LIMITED, ", ".join(shown), follows, change)
    return Finding("job limits", GOOD, ", ".join(shown))


def directory(path: str, error: int, options: Collection[str], *, is_own_volume: bool, needs: str) -> Finding:
    """Judge a directory: ``error`` is the errno of a write, ``needs`` names its content."""
    if error:
        why = "read-only" if error == errno.EROFS else os.strerror(error)
        follows = f"{needs} cannot be kept there"
        change = Change(
            f"a volume mounted on {path}, writable by this user (fsGroup for a user that is not root)",
            cpi=f"{_CPI}: ReadonlyRootfs: false, Mounts without ReadOnly",
            engine=f"--volume=NAME:{path}, writable by this user",
        )
        return Finding(path, WRONG, f"cannot be written: {why}", follows, change)
    if "noexec" in options:
        follows = "no program of a job or package runs there"
        pod, cpi = f"a volume on {path} that is mounted", f"{_CPI}: no Tmpfs or Mounts on {path} with noexec"
        change = Change(f"{pod} without noexec", cpi=cpi, engine=f"--volume=NAME:{path} without noexec")
        return Finding(path, WRONG, "mounted noexec", follows, change)
    if not is_own_volume:
        follows = f"{needs} are gone with the container"
        cpi = "a persistent disk of the instance group; the CPI brings the volume for /var/vcap/data"
        change = Change(f"a volume mounted on {path}", cpi=cpi, engine=f"--volume=NAME:{path}")
        return Finding(path, LIMITED, "in the root file system of the container", follows, change)
    return Finding(path, GOOD, "a volume of its own, writable")


def plain_directory(path: str, error: int, follows: str) -> Finding:
    """Judge a directory that only needs to be writable."""
    if not error:
        return Finding(path, GOOD, "writable")
    is_own = path.count("/") == 1 and path != "/etc"
    pod = f"an emptyDir on {path}" if is_own else "readOnlyRootFilesystem: false"
    engine = f"--tmpfs={path}" if is_own else "no --read-only"
    change = Change(pod, cpi=f"{_CPI}: ReadonlyRootfs: false", engine=engine)
    return Finding(path, LIMITED, f"cannot be written: {os.strerror(error)}", follows, change)


def space(path: str, free: int, total: int, inodes_free: int, inodes: int) -> Finding:
    """Judge the bytes and inodes of the file system of ``path``; both inode numbers are 0 without inodes."""
    text = f"{path}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    few = inodes > 0 and inodes_free / inodes < 0.05
    text += f", {inodes_free} of {inodes} inodes" if few else ""
    if free < 64 * MIB:
        return Finding("disk space", WRONG, text, "state cannot be written: a deploy fails", "a larger volume, or room")
    if free < total * 0.1 or few:
        return Finding("disk space", LIMITED, text, "a package may not fit in any more", "a larger volume, or room")
    return Finding("disk space", GOOD, text)


def shared_memory(size: int) -> Finding:
    """Bytes of /dev/shm."""
    if size < 256 * MIB:
        follows = "databases that share memory between processes (postgres) may fail when they need more"
        pod = f"an emptyDir with medium: Memory on {SHARED_MEMORY}"
        change = Change(pod, cpi=f"{_CPI}: ShmSize: BYTES", engine="--shm-size=SIZE")
        return Finding(SHARED_MEMORY, LIMITED, f"{size / MIB:.0f} MiB", follows, change)
    return Finding(SHARED_MEMORY, GOOD, f"{size / MIB:.0f} MiB")


def users(*, vcap: int | None, programs: Sequence[str], is_root: bool) -> Finding:
    """Judge users: ``vcap`` is its uid; ``programs`` are the missing ones that bosh ssh needs."""
    if vcap is None and is_root:
        change = "an image with the overlay of this project, or `useradd -u 1000 vcap`"
        return Finding("users", WRONG, "no user vcap", "jobs cannot run as vcap", change)
    if programs:
        found = f"vcap; no {', '.join(programs)}"
        return Finding("users", LIMITED, found, "no bosh ssh", "an image with passwd and openssh-server")
    if vcap not in (None, VCAP_UID):
        follows = "files of volumes from other hosts have other owners here"
        return Finding("users", LIMITED, f"vcap is user {vcap}", follows, "give vcap the number 1000")
    return Finding("users", GOOD, "vcap, and what bosh ssh makes users with" if is_root else "not needed")


def port(what: str, number: int, error: int, *, is_ours: bool) -> Finding:
    """Judge a port of the agent by the result of listening on it."""
    topic = f"port {number}"
    if is_ours:
        return Finding(topic, GOOD, f"{what}: the agent listens")
    if error == errno.EADDRINUSE:
        change = "another port in agent.json, or for the other program"
        return Finding(topic, WRONG, f"{what}: another program listens there", "the agent runs without it", change)
    if error:
        return Finding(topic, LIMITED, f"{what}: {os.strerror(error)}", "the agent runs without it", "another port")
    return Finding(topic, GOOD, f"{what}: free")


def low_ports(error: int) -> Finding:
    """Judge the result of listening on a port below 1024."""
    if error:
        follows = "routers, DNS servers and sshd cannot listen on their usual ports"
        change = _capabilities(["NET_BIND_SERVICE"], " or sysctl net.ipv4.ip_unprivileged_port_start=0")
        return Finding("ports below 1024", LIMITED, os.strerror(error).lower(), follows, change)
    return Finding("ports below 1024", GOOD, "can be listened on")


def clock(*, year: int, drift: float, is_synchronized: bool | None) -> Finding:
    """Judge the clock: ``drift`` is the uptime of /proc/uptime minus that of the kernel's clock, in seconds."""
    if year < 2024:
        follows = "certificates are not good yet: no bus"
        return Finding("clock", WRONG, f"it shows the year {year}", follows, "the time of the node")
    if abs(drift) > 5:
        found = f"/proc/uptime tells another age ({drift:+.0f} s): lxcfs"
        follows = "nothing here: ages come from the kernel; scripts that use /proc/uptime may be surprised"
        return Finding("clock", GOOD, found, follows)
    if is_synchronized is False:
        found = "the kernel says that no time server is followed"
        follows = "it may drift until certificates and logs do not fit; a container cannot set it"
        return Finding("clock", LIMITED, found, follows, "a time server on the node")
    return Finding("clock", GOOD, "follows a time server" if is_synchronized else "no complaint")


def certificate(ends_in: float, begins_in: float, *, is_door: bool = False) -> Finding:
    """Judge a certificate of the bus or of HTTPS by the seconds until its end and its start."""
    days, topic = ends_in / 86400, "bus certificate"
    now, later = "no connection to the bus", "the Director does not reach this instance any more"
    advice = "rotate the certificates of the Director's NATS and deploy"
    late = "rotate it: a deploy with new certificates, or recreate the instance"
    if is_door:
        topic, now, later = "certificate of the HTTPS door", "the bosh CLI refuses it", "the bosh CLI refuses it"
        advice = late = "make another (cloud_provider.cert in the manifest of create-env) and run create-env"
    if begins_in > 0:
        return Finding(topic, WRONG, "not good yet", now, "the time of the node is wrong")
    if ends_in <= 0:
        return Finding(topic, WRONG, f"expired {-days:.0f} days ago", now, late)
    if days < 30:
        return Finding(topic, LIMITED, f"good for {days:.0f} days more", f"afterwards {later}", advice)
    return Finding(topic, GOOD, f"good for {days:.0f} days more")


def own_names(name_errors: Mapping[str, str]) -> Finding:
    """Judge own names: ``name_errors`` maps ``localhost`` and the host name to an error, "" for success."""
    if failed := _failures(name_errors):
        follows = "jobs do not find themselves; sudo and bosh ssh wait for name servers"
        change = "/etc/hosts writable for the agent, which completes it at the boot"
        return Finding("names", WRONG, failed, follows, change)
    return Finding("names", GOOD, f"{' and '.join(name_errors)} found")


def _failures(errors: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in errors.items() if why)


def name_servers(servers: Sequence[str], write_error: int, name_errors: Mapping[str, str]) -> Finding:
    """Judge DNS: ``name_errors`` maps required names to an error, "" for success."""
    if not servers:
        change = Change("dnsPolicy and dnsConfig of the pod", cpi=_DNS, engine="--dns=ADDRESS")
        return Finding("DNS", WRONG, "/etc/resolv.conf names no server", "names are not found", change)
    if failed := _failures(name_errors):
        change = Change(
            "dnsPolicy: ClusterFirst, a NetworkPolicy that lets port 53 out, or an address in the settings",
            cpi=f"{_DNS}, or an address of the bus instead of its name",
            engine="--dns=ADDRESS, or an address in the settings",
        )
        return Finding("DNS", WRONG, failed, "the bus cannot be found", change)
    text = ", ".join(servers) + (f"; {', '.join(name_errors)} found" if name_errors else "")
    if write_error:
        follows = "bosh-dns cannot put itself before them: /etc/resolv.conf cannot be written"
        return Finding("DNS", LIMITED, text, follows, "/etc/resolv.conf writable, where bosh-dns is deployed")
    return Finding("DNS", GOOD, text)


def addresses(own: str, missing: Mapping[str, str]) -> Finding:
    """Judge addresses: ``own`` is that of the default route; ``missing`` are expected ones that no interface has."""
    if missing:
        found = "; ".join(f"no interface has {ip} ({where})" for ip, where in missing.items())
        follows = "other instances look for this one at the wrong place"
        cpi = "`bosh recreate` this instance"
        change = Change(f"{cpi}, or give the pod its address again", cpi=cpi, engine="--ip=ADDRESS")
        return Finding("addresses", WRONG, found, follows, change)
    if not own:
        cpi = "name of the network in cloud_properties of the subnet"
        change = Change("hostNetwork or a CNI network", cpi=cpi, engine="--network=NAME")
        return Finding("addresses", LIMITED, "no default route", "dynamic networks get no address", change)
    return Finding("addresses", GOOD, own)


def bus(bus_errors: Mapping[str, str]) -> Finding | None:
    """Judge the addresses of the bus, each with an error or ""."""
    if not bus_errors:
        return None
    reached = [place for place, why in bus_errors.items() if not why]
    if not reached:
        follows = "the Director does not reach this instance"
        advice = "firewall that lets port 4222 out; is the Director's NATS up?"
        change = Change(f"a NetworkPolicy or {advice}", cpi=f"a {advice}", engine=f"a {advice}")
        return Finding("bus", WRONG, _failures(bus_errors), follows, change)
    return Finding("bus", GOOD, f"{', '.join(reached)} can be reached")


def firewall(obstacle: str) -> Finding:
    """Judge the firewall: ``obstacle`` is the reason the rules do not, or could not, keep jobs from the bus."""
    if not obstacle:
        return Finding("firewall", GOOD, "keeps jobs from the bus")
    follows = "a job that has got hold of a certificate of the bus can use it"
    change = _capabilities(["NET_ADMIN"], ", an image with nftables, a network of its own")
    return Finding("firewall", LIMITED, f"jobs can reach the bus: {obstacle}", follows, change)


def watches(error: int, instances: int, each: int) -> Finding:
    """Judge inotify by the result of opening it and the node's limits for a user."""
    limits = f"{instances} instances and {each} watches a user"
    if error:
        follows = "the agent does not use it; jobs that watch files fail or poll"
        change = "sysctl fs.inotify.max_user_instances=1024 on the node"
        return Finding("inotify", LIMITED, f"{os.strerror(error)} ({limits})", follows, change)
    return Finding("inotify", GOOD, limits)


def kernel(release: str, lacking: Mapping[str, str]) -> Finding:
    """Judge the kernel: ``lacking`` maps missing features to the fallback."""
    if lacking:
        found = f"Linux {release} without {', '.join(lacking)}"
        follows = "; ".join(lacking.values())
        change = "a newer kernel on the node, or a runtime class with fewer restrictions"
        return Finding("kernel", LIMITED, found, follows, change)
    return Finding("kernel", GOOD, f"Linux {release}")


def first_process(name: str, *, is_init: bool) -> Finding:
    """Judge the init, process 1 of the container."""
    if is_init:
        return Finding("process 1", GOOD, name)
    follows = "an agent that ends may not be started again, and SIGTERM to the container may not stop the jobs in order"
    pod = "command: [/opt/agent_shim/launch, …] or /sbin/init; shareProcessNamespace: false"
    engine = "/sbin/init as the command; no --init, no --pid=host"
    change = Change(pod, cpi=f"{_CPI}: no Init, no PidMode", engine=engine)
    return Finding("process 1", LIMITED, f"{name}, no known init", follows, change)
