"""``agent-shim doctor``: probe what this container allows, and report the consequences and the necessary changes.

Run the command inside the container as the agent's user. It leaves nothing behind. Privileged operations are tried in a
child process, and their effects disappear when that process ends. Temporary files and cgroups are removed. ``PROBES``
lists the probes, and ``limits.LIMITS`` lists the consequences and changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pwd
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult

from agent_shim.cli.doctor import limits
from agent_shim.cli.doctor.finding import GOOD, LIMITED, WRONG, Consequence, Finding, Report, Runtime, filled
from agent_shim.core import wire, x509
from agent_shim.core.errors import ConfigError, HostError, NoAgentError, ShimError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import (
    NATS_PORT,
    AgentConfig,
    Effective,
    Mbus,
    UpdateSettings,
    bus_address,
    parse,
    parse_config,
    parse_update,
)
from agent_shim.edges import control_client
from agent_shim.edges.bus import tls
from agent_shim.host import (
    capabilities,
    cgroups,
    clock,
    files,
    host_stats,
    job_cgroups,
    mounts,
    network,
    nftables,
    privilege_probes,
    proc,
    sandbox,
    sandbox_exec,
    user_namespace,
)
from agent_shim.host.privilege_probes import error_of
from agent_shim.services import address_watch

ANSWER_TIMEOUT_S: Final = 3.0
"""Timeout for an answer from a server."""
MAX_GREETING_BYTES: Final = 65536
"""Maximum length of a NATS server's greeting. A typical greeting is 500 bytes long."""
INITS: Final = frozenset({"s6-svscan", "systemd", "runsvdir", "init", "tini", "dumb-init", "catatonit"})
LOGIN_PROGRAMS: Final = ("useradd", "usermod", "userdel", "sshd", "ssh-keygen")
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OF_A_KUBELET: Final = re.compile(r"/pods/[0-9a-f-]{32,36}/(?:etc-hosts|containers/(?P<container>[^/]+))")
"""Matches the path on a node from which a kubelet mounts the hosts file or the termination log into a container."""
DISKS_OF_WARDEN: Final = Path("/warden-cpi-dev")
"""A directory on the host. The warden CPI mounts it into containers and mounts disks below it. With other CPIs, each
disk is a separate mount.
"""
MOUNTS_OF_LXD: Final = frozenset(map(Path, ("/dev/lxd", "/dev/.lxd-mounts", "/dev/incus", "/dev/.incus-mounts")))
"""Mount points that LXD or Incus creates in each container (LXD's driver_lxc.go)."""
RESOLV_CONF: Final = Path("/etc/resolv.conf")
MIB: Final = 1 << 20
GIB: Final = 1 << 30
VCAP_UID: Final = 1000
MIN_OPEN_FILES: Final = 65536
MIN_SHARED_MEMORY: Final = 256 * MIB
DAY_S: Final = 86400


@dataclass(frozen=True)
class ContainerView:
    """What the probes examine: the file tree, the configuration, the settings that an agent read last (None if there
    are none), and the status of a running agent (empty if there is none). Probes may create files in ``scratch``.
    """

    paths: Paths
    scratch: Path
    config: AgentConfig
    settings: Effective | None
    status: Mapping[str, Any]
    runtime: Runtime

    @property
    def is_root(self) -> bool:
        return os.geteuid() == 0

    def judged(self, topic: str, found: str, limit: str | Consequence = "", *, good: str = "", **words: str) -> Finding:
        """Return a finding for ``topic``. ``found`` describes what the probe has found.

        Without a ``limit``, or if ``found`` is "", the verdict is ``GOOD``, and the text is ``good``, which defaults to
        ``found``. Otherwise, the verdict and the suggested change come from ``limit``, which is a consequence or the
        name of a row in ``LIMITS``. ``words`` fill the placeholders in its texts. The suggested change depends on what
        created this container: a kubelet, a CPI or a container engine.
        """
        if not limit or not found:
            return Finding(topic, GOOD, good or found)
        row = limits.LIMITS[limit] if isinstance(limit, str) else limit
        change = row.change(self.runtime).format(**words)
        return Finding(topic, row.verdict, found, row.follows.format(**words), change, filled(row.patch, words))


def examine(paths: Paths, config: Path | None, creator: Runtime | None = None) -> Report:
    """Examine the container. ``config`` is the path of agent.json; the default is its path on a stemcell.

    The suggested changes are meant for ``creator`` (a kubelet, a CPI or a container engine), by default the one that
    created this container.
    """
    with _scratch(paths) as scratch:
        settings = _settings(paths)
        runtime_name = creator or runtime(settings, paths)
        view = ContainerView(paths, Path(scratch), _config(paths, config), settings, _status(paths), runtime_name)
        findings: list[Finding] = []
        for topic, probe in PROBES.items():
            try:
                findings += probe(view)
            except (OSError, ValueError, LookupError) as exc:  # a probe that fails must not prevent the others
                findings.append(Finding(topic, LIMITED, f"this check failed: {exc}"))
        mounts_work = not error_of(privilege_probes.bind_mount, view.scratch)
    return Report(_tier(view, mounts_work=mounts_work), findings)


def _tier(view: ContainerView, *, mounts_work: bool) -> str:
    """Describe how privileged the container is (its tier). Root in a user namespace is a separate tier, because it has
    no privileges on the host.
    """
    if not view.is_root:
        return "restricted: no root"
    if user_namespace.is_inside():
        return "unprivileged: root of a user namespace" + (" that may mount" if mounts_work else "")
    return "privileged" if mounts_work else "root with few capabilities"


def runtime(settings: Effective | None, paths: Paths) -> Runtime:
    """Return what kind of program created the container. A kubelet is recognized by an environment variable or its
    mounts, and the warden and LXD CPIs are recognized by their mounts. In all other cases, a CPI has created the
    container if the settings contain bus addresses, otherwise a container engine.

    An agent with a base directory other than /var/vcap runs on a workstation, which counts as a container engine.
    """
    table = mounts.mounts()
    if "KUBERNETES_SERVICE_HOST" in os.environ or any(OF_A_KUBELET.search(mount.root) for mount in table):
        return "pod"
    if any(mount.point == DISKS_OF_WARDEN for mount in table):
        return "warden"
    if any(mount.point in MOUNTS_OF_LXD for mount in table):
        return "lxd"
    return "cpi" if settings is not None and settings.mbus.urls and paths.is_system else "engine"


def container_name() -> str:
    """Return the name of this container in its pod, or "". It is taken from the kubelet's mount of the termination
    log.
    """
    found = (OF_A_KUBELET.search(mount.root) for mount in mounts.mounts())
    return next((match["container"] for match in found if match and match["container"]), "")


def _scratch(paths: Paths) -> tempfile.TemporaryDirectory[str]:
    """Return a directory in which probes can create files. The directory may be outside /tmp, because a pod with a
    read-only root file system and without a volume at /tmp cannot write there.
    """
    for parent in (None, paths.data, paths.base):
        with contextlib.suppress(OSError):
            return tempfile.TemporaryDirectory(prefix="agent-shim-doctor-", dir=parent)
    return tempfile.TemporaryDirectory(prefix="agent-shim-doctor-", dir=limits.SHARED_MEMORY)


def _config(paths: Paths, config: Path | None) -> AgentConfig:
    """Read agent.json from ``config`` or, without it, from its path on a stemcell. If the default file cannot be read,
    return the defaults. Raises ``ConfigError`` if ``config`` cannot be read, or if the content of either file is
    invalid.
    """
    path = config or paths.bosh / "agent.json"
    try:
        return parse_config(files.read(path), origin=str(path))
    except OSError as exc:
        if config is None:
            return AgentConfig()
        raise ConfigError(f"cannot read the agent's configuration from {path}: {exc.strerror}") from exc


def _settings(paths: Paths) -> Effective | None:
    """Return the settings that the agent read last, or None if there are none or they are unreadable."""
    try:
        source = parse(files.read(paths.settings_cache, is_own=True), origin=str(paths.settings_cache))
    except (OSError, ConfigError):
        return None
    update = UpdateSettings()
    with contextlib.suppress(OSError, ConfigError):
        update = parse_update(files.read(paths.update_settings, is_own=True), origin=str(paths.update_settings))
    return Effective(source, update)


def _status(paths: Paths) -> Mapping[str, Any]:
    """Return the running agent's status. It is empty if no agent is running."""
    status: Mapping[str, Any] = {}
    with contextlib.suppress(NoAgentError):
        status = control_client.ask(paths.control_socket, {"command": "status"}, timeout=ANSWER_TIMEOUT_S)
    return status


# --- user and privileges ----------------------------------------------------------------------------------------------


def _user(view: ContainerView) -> Iterator[Finding]:
    """Check that jobs can run as another user, and that files can be given to that user."""
    uid = os.geteuid()
    who = ("root" if uid == 0 else f"user {uid}") + (", of a user namespace" if user_namespace.is_inside() else "")
    ids = (vcap.pw_uid, vcap.pw_gid) if (vcap := _vcap()) else (VCAP_UID, VCAP_UID)
    if uid != 0:
        yield view.judged("user", who, "one user")
    elif error := error_of(privilege_probes.change_user, *ids):
        yield view.judged("user", f"{who}: cannot become another user ({os.strerror(error)})", "no other user")
    elif error := error_of(privilege_probes.change_owner, view.scratch, ids[0]):
        yield view.judged("user", f"{who}: cannot give files to another user ({os.strerror(error)})", "no other user")
    else:
        yield view.judged("user", f"{who}: can run jobs as another user")


def _privileges(view: ContainerView) -> Iterator[Finding]:
    """Report which capabilities are missing, and what else confines the container's processes."""
    found, topic, reasons = capabilities.privileges(), "capabilities", {**limits.NEEDED, **limits.USEFUL}
    missing = [name for name in reasons if name not in found.effective]
    missing_strong = [name for name in limits.STRONG if name not in found.effective]
    if not view.is_root:
        yield view.judged(topic, "none, as for every user except root", "no capabilities")
    elif missing:
        verdict = WRONG if any(name in limits.NEEDED for name in missing) else LIMITED
        follows = "; ".join(dict.fromkeys(reasons[name] for name in missing))
        limit = limits.capabilities(*missing, follows=follows, verdict=verdict)
        yield view.judged(topic, f"without {', '.join(missing)}", limit)
    else:
        text = f"all that the agent needs, but not {', '.join(missing_strong)}" if missing_strong else ""
        lost = "; ".join(limits.STRONG[name] for name in missing_strong)
        good = f"{len(found.effective)} capabilities, which include all that jobs may need"
        yield view.judged(topic, text, "few capabilities", good=good, lost=lost)
    known = (("no new privileges", found.no_new_privs), ("seccomp filter", found.seccomp))
    in_use = ", ".join(text for text, is_in_use in known if is_in_use)
    yield view.judged("confinement", in_use, "no new privileges" if found.no_new_privs else "", good=in_use or "none")


def _mounts(view: ContainerView) -> Iterator[Finding]:
    """Check that bind mounts and tmpfs can be created. A failure matters less if the store is already a volume."""
    tried = {"bind mount": privilege_probes.bind_mount, "tmpfs": privilege_probes.tmpfs}
    errors = {what: error_of(probe, view.scratch) for what, probe in tried.items()}
    failed = "; ".join(f"{what}: {os.strerror(error)}" for what, error in errors.items() if error)
    mount = mounts.mount_of(view.paths.store, mounts.mounts())
    has_volume = mount is not None and mount.point == view.paths.store.resolve()
    limit = "no mounts beside a volume" if has_volume else "no mounts"
    yield view.judged("mounts", failed, limit, good="bind mounts and tmpfs work")


def _isolation(view: ContainerView) -> Iterator[Finding]:
    """Report how well bpm.yml processes can be isolated from each other (``host.sandbox.Isolation``)."""
    tried = {
        "mounts": privilege_probes.bind_mount,
        "processes": privilege_probes.process_namespace,
        "users": privilege_probes.user_namespace,
    }
    can = ", ".join(name for name, probe in tried.items() if not error_of(probe, view.scratch))
    # A running agent reports its isolation level. Without an agent, determine it by trial.
    level = view.status.get("bpm", {}).get("level") or asyncio.run(sandbox.isolation()).level
    landlock = sandbox_exec.landlock_version() or "missing"
    found = f"level {level} (Landlock {landlock}; namespaces that can be created: {can or 'none'})"
    yield view.judged("bpm isolation", found, "no isolation" if level > 2 else "")  # at level 3, files are not isolated


def _users(view: ContainerView) -> Iterator[Finding]:
    """Check that the user vcap and the programs for ``bosh ssh`` exist. Only an agent that runs as root needs them."""
    vcap = _vcap()
    missing = [name for name in LOGIN_PROGRAMS if view.is_root and shutil.which(name, path=SYSTEM_PATH) is None]
    if vcap is None and view.is_root:
        yield view.judged("users", "no user vcap", "no vcap")
    elif missing:
        yield view.judged("users", f"vcap exists, but not {', '.join(missing)}", "no login programs")
    elif vcap is not None and vcap.pw_uid != VCAP_UID:
        yield view.judged("users", f"vcap is user {vcap.pw_uid}", "other vcap")
    else:
        yield view.judged("users", "vcap and the programs for bosh ssh exist" if view.is_root else "not needed")


def _vcap() -> pwd.struct_passwd | None:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("vcap")
    return None


# --- inventory --------------------------------------------------------------------------------------------------------


def _cgroups(view: ContainerView) -> Iterator[Finding]:
    """Report which cgroups are usable, and which limits the container has."""
    found = cgroups.find()
    hierarchy = found.memory or found.cpu
    # A mount on /proc/meminfo means that lxcfs is used. In that case, /proc/meminfo and /proc/stat describe the
    # container and not the host.
    has_lxcfs = any(mount.point == Path("/proc/meminfo") for mount in mounts.mounts())
    if hierarchy is None:
        yield view.judged("cgroups", "not visible", "no cgroups, lxcfs" if has_lxcfs else "no cgroups")
        return
    problem = "" if "memory" in job_cgroups.offered() else f"version {hierarchy.version}, without subgroups"
    yield view.judged(
        "cgroups", problem, "cgroups read-only", good=f"version {hierarchy.version}, subgroups can be created"
    )
    machine, cpus = host_stats.memory(), cgroups.processors(found)
    memory = cgroups.memory(found, machine) or (machine if has_lxcfs else None)
    total = memory.total if memory else None
    texts = [f"memory {total / MIB:.0f} MiB" if total else "", f"{cpus:g} processors" if cpus else ""]
    yield view.judged("limits", ", ".join(filter(None, texts)) or "none", "" if total else "no memory limit")
    if (group := cgroups.oom_group(found)) is not None:  # the path of memory.oom.group, if it contains 1
        yield view.judged("out of memory", f"{group} is 1", "kills together")


def _job_limits(view: ContainerView) -> Iterator[Finding]:
    """Report the hard limits that jobs cannot raise."""
    opened, tasks = (resource.getrlimit(which)[1] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    # A negative value is RLIM_INFINITY.
    shown = [f"{'no limit' if value < 0 else value} {what}" for value, what in ((opened, "files"), (tasks, "tasks"))]
    yield view.judged("job limits", ", ".join(shown), "few open files" if 0 <= opened < MIN_OPEN_FILES else "")


def _directories(view: ContainerView) -> Iterator[Finding]:
    """Check that data and store are volumes, and that the other directories that the agent needs are writable."""
    paths = view.paths
    needs = {
        paths.data: "packages, jobs, logs and the state of the agent",
        paths.store: "the files of jobs that have a persistent disk",
    }
    yield from (_volume(view, path, text) for path, text in needs.items() if path.is_dir())
    consequences = {
        paths.bosh: "the agent does not start",
        paths.etc: "no users, no host keys, no names of other instances in /etc/hosts: no bosh ssh",
        Path("/tmp"): "scripts that need it fail",  # noqa: S108 - only checked
        Path("/run"): "daemons that put their pid files there fail",
    }
    for path, text in consequences.items():
        if path.is_dir():
            error = error_of(privilege_probes.write, path)
            if path in (Path("/tmp"), Path("/run")):  # noqa: S108 - only compared
                limit = "top directory not writable"
            else:
                limit = "directory of another user" if error == errno.EACCES else "directory not writable"
            found = f"cannot be written: {os.strerror(error)}" if error else ""
            yield view.judged(str(path), found, limit, good="writable", needs=text, path=str(path), name=path.name)


def _volume(view: ContainerView, path: Path, needs: str) -> Finding:
    """Check a directory that should be a volume. ``needs`` says what is stored there."""
    mount, found, limit = mounts.mount_of(path, mounts.mounts()), "", ""
    is_in_root, is_data = mount is None or mount.point == Path("/"), path == view.paths.data
    if error := error_of(privilege_probes.write, path):
        found = f"cannot be written: {'read-only' if error == errno.EROFS else os.strerror(error)}"
        limit = (
            "no data volume, read-only" if error == errno.EROFS and is_in_root and is_data else "volume not writable"
        )
    elif mount and "noexec" in mount.options:
        found, limit = "mounted noexec", "volume noexec"
    elif is_in_root:
        found, limit = "in the root file system of the container", "no data volume" if is_data else "no volume"
    good = "a separate volume, writable"
    return view.judged(str(path), found, limit, good=good, needs=needs, path=str(path), name=path.name)


def _space(view: ContainerView) -> Iterator[Finding]:
    """Check the free space of each file system once, and the size of the shared memory."""
    seen = set()
    for path in (view.paths.data, view.paths.store, Path("/")):
        if path.is_dir() and (device := path.stat().st_dev) not in seen:
            seen.add(device)
            yield _free(view, path)
    memory = os.statvfs(limits.SHARED_MEMORY)
    size = memory.f_blocks * memory.f_frsize
    limit = "little shared memory" if size < MIN_SHARED_MEMORY else ""
    yield view.judged(limits.SHARED_MEMORY, f"{size / MIB:.0f} MiB", limit)


def _free(view: ContainerView, path: Path) -> Finding:
    """Check that a file system has at least 10% of its bytes and 5% of its inodes free. An inode total of 0 means that
    there is no limit. The file system counts as full if it has less free space than downloads leave for other programs
    (``bulk.transfer``).
    """
    status = os.statvfs(path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    found = f"{path}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    is_short = status.f_files > 0 and status.f_favail / status.f_files < 0.05
    found += f", {status.f_favail} of {status.f_files} inodes" if is_short else ""
    is_low = free < total * 0.1 or is_short
    is_full = free < min(64 * MIB, total * 0.05)
    return view.judged("disk space", found, "disk full" if is_full else "disk nearly full" if is_low else "")


def _kernel(view: ContainerView) -> Iterator[Finding]:
    """Check kernel features and inotify limits. Also check that process 1 is an init process, which reaps orphans."""
    has = {
        "pidfd": not error_of(privilege_probes.open_pidfd),
        "Landlock": bool(sandbox_exec.landlock_version()),
        "pressure stall information": Path("/proc/pressure/memory").exists(),
    }
    lacking = [name for name, is_there in has.items() if not is_there]
    lost = "; ".join(limits.KERNEL_FEATURES[name] for name in lacking)
    found = f"Linux {os.uname().release}" + (f" without {', '.join(lacking)}" if lacking else "")
    yield view.judged("kernel", found, "old kernel" if lacking else "", lost=lost)
    names = ("max_user_instances", "max_user_watches")
    instances, watches = (int(Path("/proc/sys/fs/inotify", name).read_text()) for name in names)
    found = f"{instances} instances and {watches} watches per user"
    error = error_of(privilege_probes.open_inotify)
    yield view.judged("inotify", f"{os.strerror(error)} ({found})" if error else found, "no inotify" if error else "")
    is_init = (name := proc.name(1)) in INITS or "agent_shim" in proc.command_line(1)
    yield view.judged("process 1", "" if is_init else f"{name}, which is not a known init", "no init", good=name)


# --- environment ------------------------------------------------------------------------------------------------------


def _clock(view: ContainerView) -> Iterator[Finding]:
    """Check the clock, and the bus certificate, whose validity depends on it."""
    # With lxcfs, /proc/uptime shows the uptime of the container instead of the machine's.
    drift = float(Path("/proc/uptime").read_text().split()[0]) - clock.boot_time()
    is_synchronized = privilege_probes.is_clock_synchronized()
    if (year := time.gmtime().tm_year) < 2024:  # before this program was written
        yield view.judged("clock", f"it shows the year {year}", "wrong year")
    elif abs(drift) > 5:  # without lxcfs, the two differ only by the time between the two calls
        yield view.judged(
            "clock", f"/proc/uptime shows the uptime of the container ({drift:+.0f} s, lxcfs)", "other uptime"
        )
    elif is_synchronized is False:
        yield view.judged("clock", "according to the kernel, not synchronized with a time server", "no time server")
    else:
        yield view.judged("clock", "synchronized with a time server" if is_synchronized else "plausible")
    if view.settings is not None and "BEGIN CERTIFICATE" in view.settings.mbus.certificate:
        yield _certificate(view, view.settings.mbus)


def _certificate(view: ContainerView, mbus: Mbus) -> Finding:
    """Check the validity of the bus certificate or, for ``create-env``, of the HTTPS endpoint's certificate."""
    begins, ends = x509.validity(mbus.certificate)
    now = clock.wall_time()
    days = (ends - now) / DAY_S
    kind, topic = ("HTTPS", "HTTPS certificate") if mbus.scheme == "https" else ("bus", "bus certificate")
    found, limit = f"valid for {days:.0f} more days", f"{kind} certificate near its end" if days < 30 else ""
    if begins > now:
        found, limit = "not valid yet", f"{kind} certificate not yet valid"
    elif days <= 0:
        found, limit = f"expired {-days:.0f} days ago", f"{kind} certificate expired"
    return view.judged(topic, found, limit)


def _ports(view: ContainerView) -> Iterator[Finding]:
    """Check the port for metrics and probes, and whether jobs can listen on ports below 1024."""
    host, colon, port = view.config.shim.http.rpartition(":")
    if colon and port.isdigit():
        address, number = host.strip("[]"), int(port)
        topic, what = f"port {number}", "metrics and probes"
        is_answered = bool(view.status) and not _failure(_connect, address, number)
        if is_answered and network.listeners(number) <= {os.geteuid()}:  # no other user listens on the port
            yield view.judged(topic, f"{what}: the agent listens")
        elif not (error := error_of(privilege_probes.listen, address, number)):
            yield view.judged(topic, f"{what}: free")
        elif error == errno.EADDRINUSE:
            yield view.judged(topic, f"{what}: another program listens there", "port taken")
        else:
            yield view.judged(topic, f"{what}: {os.strerror(error)}", "port refused")
    found = os.strerror(error).lower() if (error := error_of(privilege_probes.listen_low)) else ""
    limit = "no low ports" if view.is_root else "no low ports without root"
    yield view.judged("ports below 1024", found, limit, good="available")


def _connect(host: str, port: int) -> None:
    """Connect to a server that listens on ``host``. Raises ``OSError``."""
    # If the server listens on all addresses, connect to the loopback address.
    address = "127.0.0.1" if host in ("", "0.0.0.0") else "::1" if host == "::" else host  # noqa: S104 - no bind
    socket.create_connection((address, port), ANSWER_TIMEOUT_S).close()


def _failure(call: Callable[..., object], *arguments: Any) -> str:
    """Return the error message from a call, or "" if the call succeeds."""
    try:
        call(*arguments)
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _names(view: ContainerView) -> Iterator[Finding]:
    """Check that localhost and the container's own host name can be resolved."""
    names = ("localhost", socket.gethostname())
    yield view.judged("names", _unknown(names), limit="own names unknown", good=f"{' and '.join(names)} resolved")


def _unknown(names: Iterable[str]) -> str:
    """Return the names that cannot be resolved, each with the reason."""
    errors = {name: _failure(socket.getaddrinfo, name, None) for name in names}
    return "; ".join(f"{name}: {why}" for name, why in errors.items() if why)


def _name_servers(view: ContainerView) -> Iterator[Finding]:
    """Check that there are name servers, and that the host names in the bus addresses can be resolved."""
    servers = re.findall(r"^[ \t]*nameserver[ \t]+(\S+)", RESOLV_CONF.read_text(errors="replace"), re.MULTILINE)
    hosts = [address.hostname or "" for address in _bus_addresses(view)]
    names = [host for host in hosts if not network.family_of(host)]
    found = ", ".join(servers) + (f"; {', '.join(names)} resolved" if names else "")
    if not servers:
        yield view.judged("DNS", "/etc/resolv.conf names no server", "no name server")
    elif failed := _unknown(names):
        yield view.judged("DNS", failed, "bus name unknown")
    else:
        # bosh-dns adds itself to resolv.conf, so the file must be writable.
        is_fixed = view.is_root and error_of(privilege_probes.open_for_writing, RESOLV_CONF)
        yield view.judged("DNS", found, "fixed name servers" if is_fixed else "")


def _addresses(view: ContainerView) -> Iterator[Finding]:
    """Check that interfaces have the addresses in the settings and the spec, and that there is a default route."""
    expected = address_watch.expected(view.settings, _applied(view.paths)) if view.settings else {}
    missing = [f"no interface has {ip} ({where})" for ip, where in expected.items() if not network.has_address(ip)]
    own = network.default_address() or network.default_address(ipv6=True)
    limit = "address missing" if missing else "" if own else "no default route"
    yield view.judged("addresses", "; ".join(missing) or (own.ip if own else "no default route"), limit)


def _applied(paths: Paths) -> Mapping[str, Any]:
    """Return the networks in the applied spec, or an empty mapping before the first ``apply``."""
    try:
        networks = wire.decode(files.read(paths.spec, is_own=True), dict[str, Any]).get("networks")
    except (OSError, ValueError):
        return {}
    return networks if isinstance(networks, dict) else {}


def _bus(view: ContainerView) -> Iterator[Finding]:
    """Check that at least one bus address can be reached, and that firewall rules keep jobs from reaching the bus."""
    errors = {
        f"{address.hostname}:{address.port or NATS_PORT}": _bus_error(view, address) for address in _bus_addresses(view)
    }
    if not errors:
        return
    reached = ", ".join(address for address, why in errors.items() if not why)
    found = "" if reached else "; ".join(f"{address}: {why}" for address, why in errors.items())
    yield view.judged("bus", found, "bus not reached", good=f"{reached} can be reached")
    found = f"jobs can reach the bus: {obstacle}" if (obstacle := _firewall_obstacle(view)) else ""
    yield view.judged("firewall", found, "no firewall", good="keeps jobs from the bus")


def _bus_addresses(view: ContainerView) -> list[SplitResult]:
    """Return the NATS addresses in the settings. There are none after ``create-env``."""
    addresses = [bus_address(url) for url in view.settings.mbus.urls] if view.settings else []
    return [address for address in addresses if address.scheme == "nats" and address.hostname]


def _bus_error(view: ContainerView, address: SplitResult) -> str:
    """Return why the bus cannot be reached, or "". The reason is the running agent's connection error or, without a
    running agent, the error of a test handshake.

    The handshake is completed, because otherwise the server would log an error.
    """
    if reported := view.status.get("bus"):
        return "" if reported["connected"] else str(reported["error"]) or "not connected yet"
    assert view.settings is not None, "the address comes from the settings"
    try:
        server = (address.hostname or "", address.port or NATS_PORT)
        with socket.create_connection(server, ANSWER_TIMEOUT_S) as connection:
            context = tls.client_context(view.settings.mbus)
            _read_greeting(connection)
            secured = context.wrap_socket(connection, server_hostname=address.hostname)
            with secured, contextlib.suppress(OSError):
                secured.unwrap()
    except (ShimError, OSError) as exc:
        return getattr(exc, "verify_message", "") or getattr(exc, "strerror", None) or str(exc)
    return ""


def _read_greeting(connection: socket.socket) -> None:
    """Read the server's greeting, which is one line. Read it byte by byte, because TLS starts directly after it."""
    for _ in range(MAX_GREETING_BYTES):
        if connection.recv(1) in (b"", b"\n"):
            return


def _firewall_obstacle(view: ContainerView) -> str:
    """Return why the agent cannot use firewall rules to block the jobs' access to the bus, or "" if it can."""
    if reported := view.status.get("firewall"):
        return str(reported["why"])
    if not view.is_root:
        return "only root may filter packets"
    try:
        asyncio.run(nftables.look())
    except HostError as exc:
        return str(exc)
    return ""


PROBES: Final[Mapping[str, Callable[[ContainerView], Iterator[Finding]]]] = {
    "user": _user,
    "capabilities": _privileges,
    "users": _users,
    "mounts": _mounts,
    "bpm isolation": _isolation,
    "cgroups": _cgroups,
    "job limits": _job_limits,
    "directories": _directories,
    "disk space": _space,
    "kernel": _kernel,
    "clock": _clock,
    "ports": _ports,
    "names": _names,
    "DNS": _name_servers,
    "addresses": _addresses,
    "bus": _bus,
}
"""The probes, in the order of the report. Each probe yields its findings."""
