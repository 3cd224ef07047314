"""Parses agent.json and the settings that a CPI writes, decides which settings take precedence, and describes errors in
them. This module performs no I/O.

Field names and precedence follow the Go agent (app/config.go, settings/settings.go, settings/update_settings.go).
Unused keys are ignored. Null means absent.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from agent_shim.core import config_check, wire, x509
from agent_shim.core.errors import ConfigError, SettingsError
from agent_shim.core.paths import Paths
from agent_shim.core.wire import Internal, Lenient

T = TypeVar("T")

CPI_SETTINGS: Final = (
    Path("/var/vcap/bosh/warden-cpi-agent-env.json"),
    Path("/var/vcap/bosh/instance_settings.json"),
    Path("/var/vcap/bosh/settings-source-file/config.json"),
)
"""Settings files that container CPIs write. All of these CPIs except the Kubernetes CPI write the first file."""
MAX_MISTAKES: Final = 20
"""Maximum number of problems that are listed in one error message."""
_PORT: Final = "(?:[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
LISTENER: Final = rf"\A(?:off|(?P<host>.+):(?P<port>{_PORT}))\Z"
Listener = Annotated[str, msgspec.Meta(pattern=LISTENER, description="ADDR:PORT or off")]
OptionalListener = Annotated[str, msgspec.Meta(pattern=rf"\A\Z|{LISTENER}", description="ADDR:PORT or off")]
Size = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,15}[kKmMgG]?\Z", description="a size like 50M")]
Level = Annotated[
    str, msgspec.Meta(pattern=r"\A(?i:debug|info|warning|error)\Z", description="debug, info, warning or error")
]


# --- agent.json -------------------------------------------------------------------------------------------------------


class Source(msgspec.Struct, frozen=True, rename="pascal"):
    """An element of ``Infrastructure.Settings.Sources``. Only the ``File`` type makes sense in a container."""

    type: str
    settings_path: str = ""


class Sources(msgspec.Struct, frozen=True, rename="pascal"):
    sources: list[Source] = []


class Infrastructure(msgspec.Struct, frozen=True, rename="pascal"):
    settings: Sources = Sources()


class SshOptions(msgspec.Struct, frozen=True):
    """Options for the ssh server that the agent starts if none is running."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 22


class BpmOptions(msgspec.Struct, frozen=True):
    """Options for bpm.yml. If ``strict`` is set, a process that the container cannot isolate as requested is not
    started.
    """

    strict: bool = False


class MonitOptions(msgspec.Struct, frozen=True):
    """Options for replacing monit. ``http`` is the address of monit's API, and ``mail`` is the address to which monit
    sends alerts under the Go agent. Each is ``ADDR:PORT`` or ``off``.

    The default "" means the usual port if the base directory is ``/var/vcap``, and otherwise ``off``.
    """

    http: OptionalListener = ""
    mail: OptionalListener = ""
    password: str = ""
    """Password to use instead of a random one, for releases that rely on the Go agent's password
    (``random-password``).
    """


class LogOptions(msgspec.Struct, frozen=True, rename="camel"):
    """Options for job log rotation, which ``rotate`` enables. Sizes are written as in logrotate (``50M``)."""

    rotate: bool = True
    size: Size = "50M"
    """Maximum size of a file. ``properties.logging.max_log_file_size`` from the Director takes precedence."""
    keep: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 7
    total: Size = "1G"
    """Maximum total size of all archives."""
    period: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Seconds between two checks."""


class ShimOptions(msgspec.Struct, frozen=True, rename="camel"):
    """Options of this agent, under the ``AgentShim`` key, which the Go agent ignores."""

    http: Listener = "0.0.0.0:9190"
    """Address of the HTTP server for metrics and probes, as ``ADDR:PORT``, or ``off``."""
    log_format: Annotated[str, msgspec.Meta(pattern=r"\A(?:json|text)?\Z", description="json or text")] = ""
    log_level: Level = "info"
    grace: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How many seconds the agent may take to stop all jobs before it exits. Must be less than the pod's
    terminationGracePeriodSeconds.
    """
    spec: str = ""
    """Directory of rendered jobs and packages to deploy without a Director."""
    firewall: bool = True
    """If the agent is allowed to set packet filter rules, use them to keep jobs from connecting to the bus."""
    job_logs: bool = False
    """Copy the jobs' log files to standard output."""
    bpm: BpmOptions = BpmOptions()
    logs: LogOptions = LogOptions()
    monit: MonitOptions = MonitOptions()
    ssh: SshOptions = SshOptions()


class AgentConfig(msgspec.Struct, frozen=True):
    """Content of agent.json. Its ``Platform`` part, which configures a machine's disks and networks, is ignored."""

    infrastructure: Infrastructure = msgspec.field(default=Infrastructure(), name="Infrastructure")
    shim: ShimOptions = msgspec.field(default=ShimOptions(), name="AgentShim")

    def settings_files(self, paths: Paths) -> list[Path]:
        """Return the possible settings files in the order in which they are tried, each as a path in the tree of
        ``paths``.

        If agent.json names files, only those are tried, unless one of them is a file that a container CPI writes. In
        that case the files of all other container CPIs are tried afterwards, because an official stemcell names only
        one of them. If no file is named, the files of all container CPIs are tried, because a volume may hide
        agent.json.
        """
        sources = self.infrastructure.settings.sources
        named = [Path(each.settings_path) for each in sources if each.type == "File" and each.settings_path]
        if named and not set(named) & set(CPI_SETTINGS):
            return [paths.moved(path) for path in named]
        return [paths.moved(path) for path in dict.fromkeys([*named, *CPI_SETTINGS])]


_OF_THE_GO_AGENT: Final = frozenset({"platform", "infrastructure"})
"""Members of agent.json that belong to the Go agent (its ``app/config.go``), in lower case."""


def parse_config(raw: bytes, *, origin: str, unknown: list[str] | None = None) -> AgentConfig:
    """Parse the content of agent.json. Raises ``ConfigError``, which lists up to ``MAX_MISTAKES`` problems and gives
    ``origin`` as the name of the file.

    For each unknown key, at the top level or in ``AgentShim``, a line is appended to ``unknown``. Unknown keys in the
    Go agent's own parts are not reported.
    """
    try:
        document = wire.decode_json(raw)
        if unknown is not None:
            members = document.items() if isinstance(document, dict) else ()
            own_keys = {key: value for key, value in members if key.lower() not in _OF_THE_GO_AGENT}
            unknown += config_check.unknown_keys(own_keys, AgentConfig)
        return _converted(document, AgentConfig)
    except ValueError as exc:
        raise ConfigError(f"cannot read the agent's configuration from {origin}: {_placed(exc, raw)}") from exc


# --- settings ---------------------------------------------------------------------------------------------------------


class Cert(msgspec.Struct, frozen=True):
    """A client certificate with its key, and the bus's CA, all in PEM."""

    ca: str = ""
    certificate: str = ""
    private_key: str = ""


class MbusSettings(msgspec.Struct, frozen=True):
    cert: Cert = Cert()
    urls: list[str] = []


class Blobstore(msgspec.Struct, frozen=True):
    """A blobstore: its type, and its options in the format of the Director's blobstore clients."""

    provider: str = "dummy"
    options: dict[str, Any] = {}
    proxies: Internal[dict[str, str]] = {}
    """``http_proxy`` and related variables for connections to the blobstore. They are set in another part of the
    settings (``Env``).
    """


class TmpfsDir(msgspec.Struct, frozen=True):
    tmpfs: bool = False
    tmpfs_size: str = ""

    def size(self, default: str) -> str:
        """Return the configured size in the format of mount(8), or ``default`` if the setting is not a valid size."""
        return self.tmpfs_size if re.fullmatch(r"[0-9]+[kmgKMG%]?", self.tmpfs_size) else default


class RunDir(TmpfsDir, frozen=True):
    """The tmpfs for the run directory. The Go agent always mounts it and takes only its size from the settings."""

    tmpfs: Lenient[bool] = False


class AgentSettings(msgspec.Struct, frozen=True):
    """Content of ``env.bosh.agent.settings``. The Go agent does not have ``settling_time``."""

    tmpfs: bool = False
    settling_time: Lenient[Annotated[float, msgspec.Meta(ge=0, le=3600)]] = 0.0
    """Minimum number of seconds from ``start`` until the instance is reported as ``running``, for scripts that rely on
    the delay until monit's first cycle.
    """


class AgentEnv(msgspec.Struct, frozen=True):
    settings: AgentSettings = AgentSettings()


class Ipv6(msgspec.Struct, frozen=True):
    enable: bool = False


class BoshEnv(msgspec.Struct, frozen=True):
    """Content of ``env.bosh``: agent options that come from the Director and the manifest."""

    agent: AgentEnv = AgentEnv()
    mbus: MbusSettings = MbusSettings()
    blobstores: list[Blobstore] = []
    ntp: list[str] | None = None
    ipv6: Ipv6 = Ipv6()
    remove_dev_tools: bool = False
    remove_static_libraries: bool = False
    swap_size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Size of the swap space in MB."""
    password: str = ""
    keep_root_password: bool = False
    authorized_keys: list[str] = []
    parallel: int = 5
    job_dir: TmpfsDir = TmpfsDir()
    run_dir: RunDir = RunDir()


class Env(msgspec.Struct, frozen=True):
    """Content of ``env``. The three proxy members override the environment variables of the same names."""

    bosh: BoshEnv = BoshEnv()
    http_proxy: Lenient[str] = ""
    https_proxy: Lenient[str] = ""
    no_proxy: Lenient[str] = ""
    persistent_disk_fs: str = ""
    persistent_disk_mount_options: list[str] = []
    persistent_disk_partitioner: str = ""


class Network(msgspec.Struct, frozen=True):
    """A network in the settings (settings/settings.go)."""

    type: str = ""
    ip: str = ""
    netmask: str = ""
    gateway: str = ""
    prefix: str = ""
    default: list[str] = []
    dns: list[str] = []
    use_dhcp: bool = False
    resolved: bool = False
    """True if the Go agent has filled in the address, which was dynamic before."""
    preconfigured: bool = False
    """Not used, but as in the Go agent, a value of the wrong type is an error."""

    @property
    def is_dynamic(self) -> bool:
        """True if the address comes from the machine rather than the settings."""
        if self.type == "vip":
            return False
        return self.type == "dynamic" or self.use_dhcp or self.resolved or not (self.ip and self.netmask)


class DisksOfSettings(msgspec.Struct, frozen=True):
    system: Any = None
    ephemeral: Any = None
    persistent: dict[str, Any] = {}


class VmSettings(msgspec.Struct, frozen=True):
    name: str = ""


class Settings(msgspec.Struct, frozen=True):
    """The settings document that a CPI writes."""

    agent_id: str = ""
    vm: VmSettings = VmSettings()
    mbus: str = ""
    blobstore: Blobstore = Blobstore()
    ntp: list[str] = []
    networks: dict[str, Network] = {}
    disks: DisksOfSettings = DisksOfSettings()
    env: Env = Env()


class DiskAssociation(msgspec.Struct, frozen=True):
    name: str = ""
    cid: str = ""


class UpdateSettings(msgspec.Struct, frozen=True):
    """Settings from ``update_settings`` (settings/update_settings.go). They are stored in a file that contains every
    member, even empty ones.
    """

    blobstores: list[Blobstore] | None = None
    disk_associations: list[DiskAssociation] = []
    mbus: MbusSettings = MbusSettings()
    trusted_certs: str = ""

    def merged(self, news: UpdateSettings) -> UpdateSettings:
        """Return the result of applying the next update, ``news``, to these settings. Trusted certificates and disk
        associations are always replaced. The bus and the blobstores are replaced only if the update contains them.
        """
        return UpdateSettings(
            blobstores=self.blobstores if news.blobstores is None else news.blobstores,
            disk_associations=news.disk_associations,
            mbus=self.mbus if news.mbus == MbusSettings() else news.mbus,
            trusted_certs=news.trusted_certs,
        )


def parse(raw: bytes, *, origin: str, ignored: list[str] | None = None) -> Settings:
    """Read and check a settings document. Raises ``SettingsError``, which gives ``origin`` as the name of the document
    and contains the JSON path of an invalid member.

    For each member with the wrong type that the Go agent does not read, a line is appended to ``ignored``.
    """
    settings = _decoded(raw, Settings, origin, ignored)
    if not settings.agent_id:
        raise SettingsError(f"cannot use the settings in {origin}: $.agent_id is empty")
    # ``.``, ``*`` and ``>`` have a special meaning in NATS subjects, and ``/`` would be unsafe in a path.
    if any(each in ".*>/" or each.isspace() or not each.isprintable() for each in settings.agent_id):
        raise SettingsError(f"cannot use the settings in {origin}: $.agent_id is not a valid bus subject token")
    return settings


def parse_update(raw: bytes, *, origin: str) -> UpdateSettings:
    """Read update_settings.json."""
    return _decoded(raw, UpdateSettings, origin)


def _decoded(raw: bytes, wanted: type[T], origin: str, ignored: list[str] | None = None) -> T:
    """Decode a document, which must not be empty. For ``origin`` and ``ignored``, see :func:`parse`."""
    if not raw.strip():
        raise SettingsError(f"cannot read settings from {origin}: the file is empty")
    try:
        return _converted(wire.decode_json(raw), wanted, ignored)
    except ValueError as exc:
        raise SettingsError(f"cannot read settings from {origin}: {_placed(exc, raw)}") from exc


def _placed(exc: ValueError, raw: bytes) -> str:
    """Return the error message, with a byte offset at its end replaced by the line and column."""
    text = str(exc)
    head, found, tail = text.rpartition("(byte ")
    number = tail.removesuffix(")")
    if not found or not number.isdecimal():
        return text
    before = raw[: int(number)]
    line = before.count(b"\n") + 1
    column = len(before) - before.rfind(b"\n")
    return f"{head}(line {line} column {column})"


def _converted(document: Any, wanted: type[T], ignored: list[str] | None = None) -> T:
    """Convert a decoded document to the type ``wanted``. Raises ``ValueError`` with the first ``MAX_MISTAKES``
    problems.
    """
    try:
        return wire.convert(document, wanted, ignored)
    except msgspec.ValidationError as exc:
        found = config_check.mistakes(wire.normalized(document, wanted, []), wanted)
        raise ValueError("; ".join(islice(found, MAX_MISTAKES)) or str(exc)) from exc


def require_bus(settings: Effective, origin: str) -> None:
    """Raise ``SettingsError`` if ``settings`` has no bus address, or if an address in the settings file ``origin`` is
    invalid. Addresses from ``update_settings`` are not checked, because they take precedence over those in the file.
    """
    urls = settings.mbus.urls
    if not urls:
        raise SettingsError(f"cannot use the settings in {origin}: neither $.env.bosh.mbus.urls nor $.mbus is set")
    if not settings.update.mbus.urls and not all(map(_is_bus_address, urls)):
        member = "$.env.bosh.mbus.urls" if settings.source.env.bosh.mbus.urls else "$.mbus"
        raise SettingsError(f"cannot use the settings in {origin}: {member} is not an address like nats://HOST:PORT")


def _is_bus_address(url: str) -> bool:
    parts = bus_address(url)
    # The agent itself listens on an https address, so the host is optional. Without a host, the agent listens on all
    # addresses.
    return parts.scheme == "https" or (parts.scheme == "nats" and bool(parts.hostname))


# --- combined results -------------------------------------------------------------------------------------------------


class Mbus(msgspec.Struct, frozen=True):
    """Addresses and credentials for the message bus."""

    urls: tuple[str, ...]
    ca: str
    certificate: str
    private_key: str

    @property
    def scheme(self) -> str:
        """``nats`` or ``https``, taken from the first address (mbus/handler_provider.go), or "" without a bus."""
        return self.urls[0].partition("://")[0] if self.urls else ""


class Effective(msgspec.Struct, frozen=True):
    """The CPI's settings combined with ``update_settings``."""

    source: Settings
    update: UpdateSettings

    @property
    def agent_id(self) -> str:
        return self.source.agent_id

    @property
    def mbus(self) -> Mbus:
        """Bus addresses and credentials, chosen by precedence.

        URLs come from ``update_settings``, otherwise from ``env.bosh.mbus.urls``, otherwise from ``mbus``. Credentials
        come from ``update_settings`` if it contains a CA, unless the certificate in ``env.bosh.mbus`` became valid
        later. In that case, the settings document was changed after the Director's update, for example by rotating a
        Secret.
        """
        updated, env = self.update.mbus.cert, self.source.env.bosh.mbus.cert
        return self._mbus(updated if updated.ca and not _begins(env) > _begins(updated) else env)

    @property
    def asked_mbus(self) -> Mbus:
        """Bus addresses with the credentials from the last ``update_settings``, even if ``mbus`` uses a newer
        certificate from ``env.bosh.mbus`` instead. Before ``update_settings`` stores these credentials, it connects
        with them, and fails if they are rejected.
        """
        return self._mbus(self.update.mbus.cert) if self.update.mbus.cert.ca else self.mbus

    @property
    def known_mbus(self) -> list[Mbus]:
        """All addresses and credentials to try for the bus connection: the current ones, then the CPI's, then those
        from ``update_settings``, if it contains any credentials. The others are tried if the server rejects the current
        ones.
        """
        updated, of_cpi = self.update.mbus.cert, Effective(self.source, UpdateSettings()).mbus
        return list(dict.fromkeys([self.mbus, of_cpi, *([self._mbus(updated)] if updated.ca else [])]))

    def _mbus(self, cert: Cert) -> Mbus:
        """Return the current bus addresses with the credentials in ``cert``."""
        urls = self.update.mbus.urls or self.source.env.bosh.mbus.urls or [self.source.mbus]
        return Mbus(tuple(filter(None, urls)), cert.ca, cert.certificate, cert.private_key)

    @property
    def blobstore(self) -> Blobstore:
        """The blobstore to use. As in the Go agent, it is the first in the list."""
        env = self.source.env
        stores = self.update.blobstores or env.bosh.blobstores or [self.source.blobstore]
        proxies = {"http_proxy": env.http_proxy, "https_proxy": env.https_proxy, "no_proxy": env.no_proxy}
        return msgspec.structs.replace(stores[0], proxies={name: value for name, value in proxies.items() if value})

    @property
    def ntp(self) -> list[str]:
        """Time servers. Even an empty list in ``env.bosh.ntp`` replaces the list in ``ntp``."""
        listed = self.source.env.bosh.ntp
        return self.source.ntp if listed is None else listed

    @property
    def name_servers(self) -> list[str]:
        """Name servers of the network that is the default for DNS. If there is only one network, it is the default
        (settings/settings.go).
        """
        networks = [network for network in self.source.networks.values() if network.type != "vip"]
        if len(networks) > 1:
            networks = [network for network in networks if "dns" in network.default]
        return [server for network in networks for server in network.dns]


NATS_PORT: Final = 4222
"""Port of a NATS server whose address contains no port."""


def bus_address(url: str) -> SplitResult:
    """Split a bus address. For an invalid address the parts are empty and the port is None.

    An address is also invalid if its password contains an unescaped character such as ``/``, because the host would end
    there, and the user and the beginning of the password would be taken for host and port.
    """
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.port != 0 and "@" not in f"{parts.path}{parts.query}{parts.fragment}":
            return parts
    return urlsplit("")


def _begins(cert: Cert) -> float:
    """Return the start of a certificate's validity in seconds since 1970, or minus infinity if the certificate is
    unreadable.
    """
    return next((validity.begins for validity in x509.validities(cert.certificate)), float("-inf"))
