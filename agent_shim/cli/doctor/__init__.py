"""``agent-shim doctor``: probe what this container allows, and name consequences and changes.

Run inside the container as the agent's user. It changes nothing: the effects of each probe end with its child process.
This module collects facts, ``verdicts`` interprets them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult

from agent_shim.cli.doctor import verdicts
from agent_shim.cli.doctor.finding import LIMITED, Finding, Report, Runtime
from agent_shim.core import wire, x509
from agent_shim.core.errors import ConfigError, HostError, NoAgentError, ShimError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import (
    AgentConfig,
    Effective,
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
"""Timeout of an answer over the network."""
MAX_GREETING_BYTES: Final = 65536
"""Maximum length of a NATS server's greeting; a typical line has 500 bytes."""
INITS: Final = frozenset({"s6-svscan", "systemd", "runsvdir", "init", "tini", "dumb-init", "catatonit"})
LOGIN_PROGRAMS: Final = ("useradd", "usermod", "userdel", "sshd", "ssh-keygen")
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OF_A_KUBELET: Final = re.compile(r"/pods/[0-9a-f-]{32,36}/(etc-hosts|containers/)")
"""The directory on a node from which a kubelet mounts the hosts file and the termination log into containers."""
DISKS_OF_WARDEN: Final = Path("/warden-cpi-dev")
"""The directory of the host below which the warden CPI mounts disks; other CPIs mount each disk below that path."""
RESOLV_CONF: Final = Path("/etc/resolv.conf")


@dataclass(frozen=True)
class ContainerView:
    """The subject of an examination: tree, configuration, and settings and status of a running agent, if any."""

    paths: Paths
    scratch: Path
    config: AgentConfig
    settings: Effective | None
    status: Mapping[str, Any]

    @property
    def is_root(self) -> bool:
        return os.geteuid() == 0


def examine(paths: Paths, config: Path | None) -> Report:
    """Examine the container; ``config`` is agent.json, by default that of stemcells."""
    with _scratch(paths) as scratch:
        view = ContainerView(paths, Path(scratch), _config(paths, config), _settings(paths), _status(paths))
        findings: list[Finding] = []
        for topic, check in CHECKS.items():
            try:
                findings += check(view)
            except (OSError, ValueError, LookupError) as exc:
                findings.append(Finding(topic, LIMITED, f"cannot be looked at: {exc}"))
        bind_error = error_of(privilege_probes.bind_mount, view.scratch)
        adapted = [finding.for_runtime(runtime(view.settings)) for finding in findings]
        return Report(verdicts.tier(is_root=view.is_root, mounts=not bind_error), adapted)


def runtime(settings: Effective | None) -> Runtime:
    """The creator of the container, by a mount of a kubelet or of all disks by warden; else a bus implies a CPI."""
    table = mounts.mounts()
    if "KUBERNETES_SERVICE_HOST" in os.environ or any(OF_A_KUBELET.search(mount.root) for mount in table):
        return "pod"
    if any(mount.point == DISKS_OF_WARDEN for mount in table):
        return "warden"
    return "cpi" if settings is not None and settings.mbus.urls else "engine"


def _scratch(paths: Paths) -> tempfile.TemporaryDirectory[str]:
    """A directory for probes; a pod with a read-only root file system may lack /tmp."""
    for place in (None, paths.data, paths.base):
        with contextlib.suppress(OSError):
            return tempfile.TemporaryDirectory(prefix="agent-shim-doctor-", dir=place)
    return tempfile.TemporaryDirectory(prefix="agent-shim-doctor-", dir=verdicts.SHARED_MEMORY)


def _config(paths: Paths, config: Path | None) -> AgentConfig:
    path = config or paths.bosh / "agent.json"
    try:
        return parse_config(files.read(path), origin=str(path))
    except OSError as exc:
        if config is None:
            return AgentConfig()
        raise ConfigError(f"cannot read the agent's configuration from {path}: {exc.strerror}") from exc


def _settings(paths: Paths) -> Effective | None:
    """The settings that the agent read last; None if there are none or they are unreadable."""
    try:
        source = parse(files.read(paths.settings_cache, is_own=True), origin=str(paths.settings_cache))
    except (OSError, ConfigError):
        return None
    update = UpdateSettings()
    with contextlib.suppress(OSError, ConfigError):
        update = parse_update(files.read(paths.update_settings, is_own=True), origin=str(paths.update_settings))
    return Effective(source, update)


def _status(paths: Paths) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {}
    with contextlib.suppress(NoAgentError):
        found = control_client.ask(paths.control_socket, {"command": "status"}, timeout=ANSWER_TIMEOUT_S)
    return found


# --- who we are -----------------------------------------------------------------------------------------------------


def _user(view: ContainerView) -> Iterator[Finding]:
    vcap = _vcap()
    uid, gid = (vcap.pw_uid, vcap.pw_gid) if vcap else (verdicts.VCAP_UID, verdicts.VCAP_UID)
    yield verdicts.user(
        os.geteuid(),
        is_mapped=user_namespace.is_inside(),
        change_user_error=error_of(privilege_probes.change_user, uid, gid) if view.is_root else 0,
        change_owner_error=error_of(privilege_probes.change_owner, view.scratch, uid) if view.is_root else 0,
    )


def _privileges(view: ContainerView) -> Iterator[Finding]:
    found = capabilities.privileges()
    yield verdicts.capabilities(found, is_root=view.is_root)
    yield verdicts.privileges(found)


def _mounts(view: ContainerView) -> Iterator[Finding]:
    bind_error = error_of(privilege_probes.bind_mount, view.scratch)
    yield verdicts.mounts(bind_error, error_of(privilege_probes.tmpfs, view.scratch))


def _isolation(view: ContainerView) -> Iterator[Finding]:
    version = sandbox_exec.landlock_version()
    namespaces = {
        "mounts": error_of(privilege_probes.bind_mount, view.scratch),
        "processes": error_of(privilege_probes.process_namespace, view.scratch),
        "users": error_of(privilege_probes.user_namespace, view.scratch),
    }
    # A running agent knows its level; without one the probe asks the kernel.
    level = view.status.get("bpm", {}).get("level") or asyncio.run(sandbox.isolation()).level
    yield verdicts.isolation(level, version, namespaces)


def _users(view: ContainerView) -> Iterator[Finding]:
    vcap = _vcap()
    missing = [name for name in LOGIN_PROGRAMS if view.is_root and shutil.which(name, path=SYSTEM_PATH) is None]
    yield verdicts.users(vcap=vcap.pw_uid if vcap else None, programs=missing, is_root=view.is_root)


def _vcap() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam("vcap")
    except KeyError:
        return None


# --- what there is --------------------------------------------------------------------------------------------------


def _cgroups(_: ContainerView) -> Iterator[Finding]:
    found, host = cgroups.find(), host_stats.memory()
    hierarchy = found.memory or found.cpu
    version, delegates = hierarchy.version if hierarchy else 0, "memory" in job_cgroups.offered()
    limits = cgroups.memory(found, host)
    memory = limits.total if limits else None
    yield from verdicts.cgroups(version, delegates=delegates, memory=memory, cpus=cgroups.processors(found))


def _job_limits(_: ContainerView) -> Iterator[Finding]:
    limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    yield verdicts.open_files(*(resource.getrlimit(limit)[1] for limit in limits))


def _directories(view: ContainerView) -> Iterator[Finding]:
    paths, table = view.paths, mounts.mounts()
    for path, needs in (
        (paths.data, "packages, jobs, logs and the state of the agent"),
        (paths.store, "the files of jobs that have a persistent disk"),
    ):
        if not path.is_dir():
            continue
        mount = mounts.mount_of(path, table)
        options, is_own = (mount.options, mount.point != Path("/")) if mount else ((), False)
        error = error_of(privilege_probes.write, path)
        yield verdicts.directory(str(path), error, options, is_own_volume=is_own, needs=needs)
    for path, follows in (
        (paths.bosh, "the agent does not start"),
        (paths.etc, "no users, no host keys, no names of other instances in /etc/hosts: no bosh ssh"),
        (Path("/tmp"), "scripts that need it fail"),  # noqa: S108 - that very directory
        (Path("/run"), "daemons that put their pid files there fail"),
    ):
        if path.is_dir():
            yield verdicts.plain_directory(str(path), error_of(privilege_probes.write, path), follows)


def _space(view: ContainerView) -> Iterator[Finding]:
    seen = set()
    for path in (view.paths.data, view.paths.store, Path("/")):
        if path.is_dir() and (device := path.stat().st_dev) not in seen:
            seen.add(device)
            found = os.statvfs(path)
            free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
            yield verdicts.space(str(path), free, total, found.f_favail, found.f_files)
    memory = os.statvfs("/dev/shm")  # noqa: S108 - that very directory
    yield verdicts.shared_memory(memory.f_blocks * memory.f_frsize)


def _kernel(_: ContainerView) -> Iterator[Finding]:
    lacking = {}
    if error_of(privilege_probes.open_pidfd):
        lacking["pidfd"] = "ends of processes that were adopted are noticed by looking, up to a second late"
    if not sandbox_exec.landlock_version():
        lacking["Landlock"] = "processes of bpm.yml are not confined to their files"
    if not Path("/proc/pressure/memory").exists():
        lacking["pressure stall information"] = "memory pressure is invisible until memory runs out"
    yield verdicts.kernel(os.uname().release, lacking)
    names = ("max_user_instances", "max_user_watches")
    limits = [int(Path("/proc/sys/fs/inotify", name).read_text()) for name in names]
    yield verdicts.watches(error_of(privilege_probes.open_inotify), *limits)
    name = proc.name(1)
    yield verdicts.first_process(name, is_init=name in INITS or "agent_shim" in proc.command_line(1))


# --- environment ----------------------------------------------------------------------------------------------------


def _clock(view: ContainerView) -> Iterator[Finding]:
    drift = float(Path("/proc/uptime").read_text().split()[0]) - clock.boot_time()
    is_synchronized = privilege_probes.is_clock_synchronized()
    yield verdicts.clock(year=time.gmtime().tm_year, drift=drift, is_synchronized=is_synchronized)
    if view.settings is not None and "BEGIN CERTIFICATE" in view.settings.mbus.certificate:
        begins, ends = x509.validity(view.settings.mbus.certificate)
        now = clock.wall_time_of(clock.boot_ticks())
        is_door = view.settings.mbus.scheme == "https"
        yield verdicts.certificate(ends - now, begins - now, is_door=is_door)


def _ports(view: ContainerView) -> Iterator[Finding]:
    host, colon, port = view.config.shim.http.rpartition(":")
    if colon and port.isdigit():
        place, number = host.strip("[]"), int(port)
        error = error_of(privilege_probes.listen, place, number)
        is_answered = bool(view.status) and not _failure(_connect, place, number)
        is_ours = is_answered and network.listeners(number) <= {os.geteuid()}
        yield verdicts.port("metrics and probes", number, error, is_ours=is_ours)
    yield verdicts.low_ports(error_of(privilege_probes.listen_low))


def _connect(host: str, port: int) -> None:
    place = "127.0.0.1" if host in ("", "0.0.0.0") else "::1" if host == "::" else host  # noqa: S104 - no bind
    socket.create_connection((place, port), ANSWER_TIMEOUT_S).close()


def _failure(call: Callable[..., object], *arguments: Any) -> str:
    """The text of the error of a call; "" if it succeeds."""
    try:
        call(*arguments)
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _bus_error(view: ContainerView, place: SplitResult) -> str:
    """The error of the running agent's link, or of a handshake as it would make it; "" without one.

    A handshake is completed: the server logs an earlier disconnect as an error.
    """
    if held := view.status.get("bus"):
        return "" if held["connected"] else str(held["error"]) or "there is no link yet"
    assert view.settings is not None, "the place is out of the settings"
    try:
        with socket.create_connection((place.hostname or "", place.port or 4222), ANSWER_TIMEOUT_S) as one:
            context = tls.client_context(view.settings.mbus)
            _read_line(one)
            secured = context.wrap_socket(one, server_hostname=place.hostname)
            with secured, contextlib.suppress(OSError):
                secured.unwrap()
    except (ShimError, OSError) as exc:
        return getattr(exc, "verify_message", "") or getattr(exc, "strerror", None) or str(exc)
    return ""


def _read_line(one: socket.socket) -> None:
    """Read the greeting of the server byte by byte, because TLS starts directly after it."""
    for _ in range(MAX_GREETING_BYTES):
        if one.recv(1) in (b"", b"\n"):
            return


def _network(view: ContainerView) -> Iterator[Finding]:
    words = [line.split() for line in RESOLV_CONF.read_text(errors="replace").splitlines()]
    servers = [word[1] for word in words if word[:1] == ["nameserver"] and len(word) > 1]
    places = [bus_address(url) for url in view.settings.mbus.urls] if view.settings else []
    places = [place for place in places if place.scheme == "nats" and place.hostname]
    names = [place.hostname for place in places if place.hostname and not network.family_of(place.hostname)]
    name_errors = {name: _failure(socket.getaddrinfo, name, None) for name in names}
    write_error = error_of(privilege_probes.open_for_writing, RESOLV_CONF) if view.is_root else 0
    yield verdicts.name_servers(servers, write_error, name_errors)
    expected = address_watch.expected(view.settings, _applied(view.paths)) if view.settings else {}
    found = network.default_address() or network.default_address(ipv6=True)
    missing = {ip: where for ip, where in expected.items() if not network.has_address(ip)}
    yield verdicts.addresses(found.ip if found else "", missing)
    bus_errors = {f"{place.hostname}:{place.port or 4222}": _bus_error(view, place) for place in places}
    if (finding := verdicts.bus(bus_errors)) is not None:
        yield finding
        yield verdicts.firewall(_firewall_obstacle(view))


def _names(_: ContainerView) -> Iterator[Finding]:
    names = ("localhost", socket.gethostname())
    yield verdicts.own_names({name: _failure(socket.getaddrinfo, name, None) for name in names})


def _firewall_obstacle(view: ContainerView) -> str:
    """The reason the rules do not, or could not, keep jobs from the bus; "" if they do or could."""
    if held := view.status.get("firewall"):
        return str(held["why"])
    if not view.is_root:
        return "only root may filter packets"
    try:
        asyncio.run(nftables.look())
    except HostError as exc:
        return str(exc)
    return ""


def _applied(paths: Paths) -> Mapping[str, Any]:
    """The networks of the applied spec."""
    try:
        networks = wire.decode(files.read(paths.spec, is_own=True), dict[str, Any]).get("networks")
    except (OSError, ValueError):
        return {}
    return networks if isinstance(networks, dict) else {}


CHECKS: Final[Mapping[str, Callable[[ContainerView], Iterator[Finding]]]] = {
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
    "network": _network,
}
