"""``./dev fuzz [TARGET…]``: feed mutated input to every parser of untrusted input for a given time.

A finding is an exception that the parser does not document, or a call that takes longer than a second. It is printed
with its input, which a developer then adds to the target's seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import io
import json
import os
import random
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import msgspec

from agent_shim.actions import state as _core
from agent_shim.actions import tasks
from agent_shim.actions.dispatch import ACTIONS
from agent_shim.bulk import archive, compression, packing, protocol
from agent_shim.core import (
    digest,
    safetext,
    settings,
    spec,
    wire,
    x509,
)
from agent_shim.core.errors import ArchiveError, BadArgumentsError, HostError, ShimError
from agent_shim.core.paths import Paths
from agent_shim.demo.pki import Authority
from agent_shim.edges import http_server
from agent_shim.edges.bus import tls
from agent_shim.host import mounts, proc
from agent_shim.services import dns, trusted_cas, volume_lease
from agent_shim.services.disks import hints, markers
from agent_shim.supervisor import bpm_api, monit_api, service, supervisor
from agent_shim.supervisor.bpm import config
from agent_shim.supervisor.monit import parser as monitrc
from agent_shim.supervisor.ownership import process_record

SLOW: Final = 1.0
"""CPU time in seconds after which a call counts as too slow."""

del _core  # The import was only needed to register the actions.


@dataclass(frozen=True)
class Target:
    """A parser to test.

    ``read`` takes bytes and may raise the exceptions in ``known``. ``seeds`` are valid inputs and the inputs of earlier
    findings.
    """

    read: Callable[[bytes], object]
    known: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    """Tokens that mutations can insert."""


def _request(data: bytes) -> object:
    request = wire.decode_request(data)
    found = ACTIONS.get(request.method)
    return found.bind(request.arguments) if found is not None else None


class _DiscardingTransport(asyncio.Transport):
    """A transport that discards everything written to it."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def write_eof(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


_LOOP: Final = asyncio.new_event_loop()


@contextmanager
def _file(data: bytes, name: str) -> Iterator[Path]:
    """Write a file with this content to a tmpfs, and yield its path."""
    with tempfile.TemporaryDirectory(prefix="agent-shim-fuzz-", dir="/dev/shm") as place:
        path = Path(place, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        yield path


def _pidfile(data: bytes) -> None:
    """Check that a pidfile never yields a number that the kernel rejects as a pid or treats as a process group."""
    with _file(data, "pid") as path:
        found = process_record.read(path)
    if found is not None:
        if found.pid <= 0:
            raise AssertionError("the pid refers to a process group")
        proc.stat(found.pid)


def _update(data: bytes) -> None:
    """Parse settings and the certificates in them, as the agent does before it uses new settings."""
    update = settings.parse_update(data, origin="fuzz")
    effective = settings.Effective(settings.Settings(), update)
    for mbus in (effective.mbus, effective.asked_mbus):
        for url in mbus.urls:
            settings.bus_address(url)
        tls.client_context(mbus)
    trusted_cas.split(update.trusted_certs)


def _marker(data: bytes) -> None:
    with _file(data, f"{markers.DIRECTORY}/{markers.NAME}") as path:
        markers.read(path.parents[1])


def _lease(data: bytes) -> None:
    with _file(data, f"{markers.DIRECTORY}/{volume_lease.NAME}") as path:
        volume_lease.VolumeLeases().twin(path.parent)


def _saved(data: bytes) -> None:
    with _file(data, "supervisor.json") as path:
        supervisor.read_saved(path)


def _journal(data: bytes) -> None:
    """Restore a task queue, and check that it contains only tasks with known methods."""
    with _file(data, "tasks.json") as path:
        queue = tasks.Tasks(path)
        _LOOP.run_until_complete(queue.resume({"fetch_logs": lambda _: lambda: asyncio.sleep(0)}))
        if queue.waiting_methods() - {"fetch_logs"}:
            raise AssertionError("a task with an unknown method is queued")


def _records(data: bytes) -> None:
    """Write DNS records to a hosts file, and check each line of it.

    Each line must contain an address and at least one name, but not the name localhost.
    """

    async def fetch() -> bytes:
        return data

    with tempfile.TemporaryDirectory(prefix="agent-shim-fuzz-", dir="/dev/shm") as place:
        paths = Paths(Path(place))
        _LOOP.run_until_complete(dns.Dns(paths).sync(3, fetch, agent_id="agent"))
        hosts = paths.etc / "hosts"
        lines = hosts.read_text().splitlines() if hosts.exists() else []
    for line in lines[2:]:
        address, *names = line.split(" ")
        if not line.isascii() or not address or address.strip("0123456789abcdefABCDEF.:") or dns.LOCALHOST in names:
            raise AssertionError(f"a forged line: {line!r}")


def _filters(data: bytes) -> None:
    """Pack a tree with long and deeply nested names. Each line of the input is used as a filter pattern."""
    with tempfile.TemporaryDirectory(prefix="agent-shim-fuzz-", dir="/dev/shm") as place:
        deep = Path(place, *["ab"] * 30)
        deep.mkdir(parents=True)
        (deep / ("a" * 250)).touch()
        tree = protocol.Tree(place, patterns=data.decode(errors="replace").split("\n"))
        packing.pack(io.BytesIO(), [tree], remarks="remarks")


class _NoProcesses:
    """A supervisor without services, which answers ``bpm`` and ``monit`` requests."""

    def rows(self) -> tuple[list[Any], list[str]]:
        return [], []

    def definition(self, _job: str, _name: str) -> None:
        return None

    def find(self, _job: str, _name: str) -> None:
        return None

    def services(self) -> list[Any]:
        return []

    def __getattr__(self, _name: str) -> Callable[..., Any]:
        async def nothing(*_: Any, **__: Any) -> SimpleNamespace:
            return SimpleNamespace(pid=1)

        return nothing

    def check_volumes(self, _job: str, _volumes: Sequence[config.Volume]) -> None:
        """Accept all volumes."""


def _asked(data: bytes) -> None:
    """Handle any JSON object first as a ``bpm`` request and then as a ``monit`` request."""
    try:
        request = msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError):  # The server would close the connection.
        return
    nothing: Any = _NoProcesses()
    _LOOP.run_until_complete(bpm_api.answer(nothing, request))
    _LOOP.run_until_complete(monit_api.answer(nothing, request, obstacle=""))


def _http(data: bytes) -> None:
    """Check that an HTTP request is parsed in the same way whether it arrives in one piece or in two."""

    async def read(*pieces: bytes) -> list[http_server.HttpRequest]:
        heard: list[http_server.HttpRequest] = []

        def answer(request: http_server.HttpRequest) -> http_server.HttpResponse:
            heard.append(request)
            return http_server.HttpResponse(200, b"")

        connection = http_server.connection(answer, ("GET", "HEAD", "POST"))
        connection.connection_made(_DiscardingTransport())
        for piece in pieces:
            connection.data_received(piece)
        connection.connection_lost(None)
        return heard

    whole = _LOOP.run_until_complete(read(data))
    cut = len(data) // 2
    if len(whole) > 1 or whole != _LOOP.run_until_complete(read(data[:cut], data[cut:])):
        raise AssertionError("a request is parsed differently if it arrives in two pieces")


def _shown(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    if not safetext.line(text).isprintable() or safetext.lines(text).encode().count(b"\x1b"):
        raise AssertionError("a text is not safe")


def _unpack(data: bytes) -> None:
    """Check that an archive is unpacked in the same way with and without gzip compression.

    Tar archives are also tried with corrected header checksums.
    """
    if data.startswith((compression.GZIP, *compression.PROGRAMS)):
        found = _unpacked(data)
    else:
        found = _read_alike(data)
        _read_alike(_with_right_sums(data))
    if isinstance(found, ArchiveError):
        raise found


def _read_alike(data: bytes) -> list[str] | ArchiveError:
    plain, packed = _unpacked(data), _unpacked(gzip.compress(data, compresslevel=1, mtime=0))
    if repr(plain) != repr(packed):
        raise AssertionError(f"an archive is unpacked differently: plain {plain!r}, gzip {packed!r}")
    return plain


def _with_right_sums(data: bytes) -> bytes:
    """Return the archive with correct checksums in all blocks that look like headers.

    Without correct checksums, unpacking would stop at nearly every mutated header.
    """
    right = bytearray(data)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 :].startswith(b"ustar"):
            right[at + 148 : at + 156] = b" " * 8
            right[at + 148 : at + 156] = b"%06o\0 " % sum(right[at : at + 512])
    return bytes(right)


def _unpacked(data: bytes) -> list[str] | ArchiveError:
    """Return a line for each entry of the unpacked archive, or the error if it was rejected."""
    with _file(data, "blob") as path:
        into = path.with_name("into")
        try:
            with path.open("rb") as file:
                archive.unpack(file, into)
        except ArchiveError as exc:
            return ArchiveError(str(exc).replace(str(into), ""))
        return list(_lines(into))


def _lines(path: Path) -> Iterator[str]:
    """Yield a line for a path and for each entry below it.

    Lines for directories omit the mtime, because a directory that the archive does not list is created during unpacking
    and gets the current time.
    """
    found = path.lstat()
    if path.is_symlink():
        yield f"{path.name!r} {path.readlink()} {found.st_mtime_ns}"
    elif path.is_dir():
        yield f"{path.name!r} {found.st_mode:o}"
        path.chmod(0o700)
        for one in sorted(path.iterdir()):
            yield from _lines(one)
    else:
        content = path.read_bytes() if os.access(path, os.R_OK) else b""
        yield f"{path.name!r} {found.st_mode:o} {found.st_mtime_ns} {content!r}"


def _tar(mode: Literal["w", "w:gz"]) -> bytes:
    out = io.BytesIO()
    kinds = {"a": tarfile.REGTYPE, "d": tarfile.DIRTYPE, "d/l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE}
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, kind in kinds.items():
            member = tarfile.TarInfo(name)
            content = b"content" if kind == tarfile.REGTYPE else b""
            member.type, member.linkname, member.size = kind, "a", len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


_SPEC: Final = {
    "deployment": "d",
    "job": {"name": "j", "version": "1", "template": "j", "templates": [{"name": "j", "version": "1"}]},
    "packages": {"p": {"name": "p", "version": "1.1", "sha1": "a" * 40, "blobstore_id": "b"}},
    "networks": {"default": {"type": "manual", "ip": "10.0.0.1", "netmask": "255.0.0.0", "default": ["dns"]}},
    "index": 0,
    "rendered_templates_archive": {"sha1": "a" * 40, "blobstore_id": "b"},
    "configuration_hash": "x",
    "persistent_disk": 10,
}
_SETTINGS: Final = {
    "agent_id": "a",
    "vm": {"name": "v"},
    "networks": {"default": {"type": "dynamic", "dns": ["1.1.1.1"], "routes": [{"destination": "10.0.0.0"}]}},
    "disks": {"system": "/dev/sda", "persistent": {"cid": {"path": "/dev/sdb", "id": 1}, "x": "/dev/sdc", "y": None}},
    "env": {"bosh": {"mbus": {"urls": ["nats://h:4222"], "cert": {"ca": "c"}}, "blobstores": [{"provider": "local"}]}},
}
_MONIT: Final = b"""check process web with pidfile /var/vcap/sys/run/web.pid
  start program "/var/vcap/jobs/web/bin/ctl start" as uid vcap and gid vcap with timeout 60 seconds
  stop program = "/bin/kill -9"
  if failed host 127.0.0.1 port 80 type tcp protocol http and request "/x" for 3 cycles then restart
  if totalmem > 500 Mb for 15 cycles then alert
  if 3 restarts within 5 cycles then unmonitor
  depends on db, other
  every 2 cycles
  group vcap # a comment
check file f with path /x
  if changed checksum then exec "/bin/true"
"""
_BPM: Final = b"""processes:
- name: web
  executable: /bin/web
  args: [--port, 80, yes, 1.10]
  env: {A: b, N: 1}
  limits: {memory: 1G, processes: 10, open_files: 100}
  additional_volumes: [{path: /var/vcap/data/x, writable: true, mount_only: false}]
  unsafe: {privileged: true, unrestricted_volumes: [{path: /var/vcap/*}]}
  hooks: {pre_start: /bin/pre}
"""
_MOUNTS: Final = (
    b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
    b"37 36 0:5 / /a\\040b rw - tmpfs tmpfs rw\n"
)
_STAT: Final = (
    b"41 (a b) S 7 41 40 0 -1 4194560 1 2 3 4 11 22 33 44 20 0 1 0 98765 1000000 250 18446744073709551615 1 1 0 0 0 0\n"
)
_CERTIFICATE: Final = Authority("fuzz").ca.encode()
_OURS: Final = Authority("fuzz").agent("a")
_PAIR: Final = {
    "ca": _CERTIFICATE.decode(),
    "certificate": _OURS.certificate,
    "private_key": _OURS.private_key,
}
_DEEP: Final = b'{"env":' + b"[" * 3000
"""Input of an earlier finding. It is nested more deeply than the decoder allows."""
_HUGE: Final = b"processes: [{name: a, executable: b, limits: {memory: " + b"8" * 400 + b"}}]"
"""Input of an earlier finding. It contains a number outside the range of a float."""
_MANY: Final = b";".join(b"%x:b" % number for number in range(10_000))
"""Input of an earlier finding. Each name was compared with all other names, which took quadratic time."""
_DAMAGED: Final = _tar("w:gz")[:-8], _tar("w:gz")[:-8] + bytes(8), _tar("w:gz")[:3] + b"\xa1" + _tar("w:gz")[4:]
"""Inputs of earlier findings. isal ignored a wrong checksum and reserved flags, and zlib ignored a missing checksum at
the end.
"""
_WIDE: Final = _tar("w")[:100] + b"\x80" + _tar("w")[101:]
"""A valid header with a mode that is encoded in base 256."""
_FOLLOWED: Final = b"POST /a HTTP/1.1\r\nContent-Length: 4\r\n\r\nbodyGET /b HTTP/1.0\r\n\r\n"
"""Input of an earlier finding. The first of two pipelined requests was parsed with the second request's method."""
_METHODS: Final = tuple(
    _json({"protocol": 3, "method": method, "arguments": arguments, "reply_to": "director.a.b.c"})
    for method, arguments in (
        ("ping", []),
        ("apply", [_SPEC]),
        ("mount_disk", ["cid", {"path": "/dev/x"}]),
        ("ssh", ["setup", {"user": "bosh_x", "public_key": "ssh-rsa AAAA"}]),
        (
            "compile_package",
            ["id", "sha", "n", "1", {"d": {"name": "d", "version": "1", "sha1": "s", "blobstore_id": "b"}}],
        ),
        (
            "update_settings",
            [{"mbus": {"urls": []}, "blobstores": [], "disk_associations": [{"name": "a", "cid": "b"}]}],
        ),
        ("sync_dns", ["b", "sha1:x", 7]),
        ("run_script", ["pre-start", {"env": {"A": "b"}}]),
        ("drain", ["update", _SPEC]),
        (
            "fetch_logs_with_signed_url",
            [{"signed_url": "u", "log_type": "job", "filters": ["*"], "blobstore_headers": {}}],
        ),
    )
)

TARGETS: Final[dict[str, Target]] = {
    "envelope": Target(
        _request, (wire.RequestError, BadArgumentsError), _METHODS, (b"null", b"[]", b"{}", b"1e999", b"\\ud800")
    ),
    "settings": Target(
        lambda data: settings.parse(data, origin="fuzz"), (ShimError,), (_json(_SETTINGS), _DEEP), (b"null", b"[]")
    ),
    "update": Target(
        lambda data: settings.parse_update(data, origin="fuzz"),
        (ShimError,),
        (_json({"mbus": {"urls": ["x"], "cert": {}}, "trusted_certs": "x", "disk_associations": []}), _DEEP),
        (b"null",),
    ),
    "config": Target(
        lambda data: settings.parse_config(data, origin="fuzz"),
        (ShimError,),
        (
            _json(
                {
                    "Platform": {"Linux": {}},
                    "Infrastructure": {"Settings": {"Sources": []}},
                    "AgentShim": {"http": "off"},
                }
            ),
        ),
        (b"null",),
    ),
    "spec": Target(spec.decode, (ShimError,), (_json(_SPEC),), (b"null", b"[]", b'"1"')),
    "monit": Target(
        lambda data: monitrc.parse(data.decode(errors="replace"), origin="fuzz"),
        (ShimError,),
        (_MONIT,),
        (*b"if then cycles { } with < 999999999999 depends tcpssl".split(), b'"', b"check process"),
    ),
    "bpm": Target(
        lambda data: config.parse(data.decode(errors="replace"), origin="fuzz"),
        (ShimError,),
        (_BPM, b"a: &a [*a]", b"x: &x {<<: *x}", _HUGE),
        (b"&a", b"*a", b"!!int", b"<<", b"- ", b"{", b"]", b"|", b"~", b"0x", b"1e99"),
    ),
    "mountinfo": Target(mounts.parse, (), (_MOUNTS,), (b"\\040", b" - ", b"\\777")),
    "stat": Target(proc.parse, (ValueError, IndexError), (_STAT,), (b"(", b")", b" ")),
    "archive": Target(
        _unpack,
        (ArchiveError,),
        (_tar("w:gz"), _tar("w"), gzip.compress(_tar("w")[:600]) + gzip.compress(_tar("w")[600:]), *_DAMAGED, _WIDE),
        (b"../", b"/", b"\0", b"0000777", compression.GZIP),
    ),
    "digest": Target(
        lambda data: digest.MultipleDigest.parse(data.decode(errors="replace")),
        (ShimError,),
        (b"sha1:" + b"a" * 40 + b";sha256:" + b"b" * 64, b"a" * 40, _MANY),
        (b";", b":", b"sha512"),
    ),
    "http": Target(
        _http,
        (),
        (
            b"POST /a?b HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody",
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n0\r\n\r\n",
            b"GET /metrics HTTP/1.0\r\nAccept: a, b\r\nAccept: c\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: 0000000009999999999\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
            _FOLLOWED,
        ),
        (b"\r\n", b"\r\n\r\n", b"\0", b"Content-Length: ", b"Transfer-Encoding: chunked", b"HTTP/1.1", b"Upgrade: h2c"),
    ),
    "certificate": Target(
        lambda data: x509.validities(data.decode("latin-1")),
        (),
        (_CERTIFICATE, _CERTIFICATE * 3, b"-----BEGIN CERTIFICATE-----MIIB-----END CERTIFICATE-----"),
        (b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----", b"MIIB", b"hP//////"),
    ),
    "hint": Target(
        lambda data: hints.from_hint("cid", wire.decode_json(data), settings.Env()).place,
        (ValueError,),
        (
            _json("/dev/sdb"),
            _json({"path": "/dev/sdb", "volume_id": "v", "id": 1, "lun": "0", "iscsi_settings": {"target": "t"}}),
        ),
        (b"null", b"{}", b"[]", b'"/"', b"\\ud800", b"1e999"),
    ),
    "pidfile": Target(
        _pidfile,
        (),
        (b"41\n", b" 41", b"0", b"-1\n", b"4194304 rest\n", b"99999999999\n", b"9" * 70),
        (b"\n", b" ", b"-", b"+", b"0x", b"\0", b"_", b"\xd9\xa1"),
    ),
    "marker": Target(
        _marker, (), (_json({"cid": "c", "role": "store", "source": "s", "generation": 1}), _DEEP), (b"null", b"-1")
    ),
    "lease": Target(
        _lease,
        (),
        (_json({"schema": 1, "holder": "h", "agent_id": "a", "host": "h", "boot": "b", "count": 2}), _DEEP),
        (b"null", b"true", b'"is_over":'),
    ),
    "saved": Target(
        _saved,
        (),
        (
            msgspec.json.encode(
                supervisor.Saved(supervisor.SCHEMA, "boot", True, [], {"web": service.ServiceRecord()})
            ),
            _DEEP,
        ),
        (b"null", b"[]", b"1e999", b'"down"', b"-1"),
    ),
    "journal": Target(
        _journal,
        (),
        (_json({"a": {"TaskID": "a", "Method": "fetch_logs", "Payload": "e30="}}), _DEEP),
        (b"null", b"{}", b"=", b"fetch_logs"),
    ),
    "records": Target(
        _records,
        (ShimError,),
        (
            _json({"version": 3, "records": [["10.0.0.1", "a.b"], ["fe80::1", "c"]], "record_keys": ["id"]}),
            b'{"version":3,"records":' + b"[" * 3000,
            b'{"version":3,"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"records":[]}',
        ),
        (b"null", b"[]", b"\\n", b"localhost", b'["1.1.1.1","a"],', b"\\u0085", b"\\ud800"),
    ),
    "filters": Target(
        _filters,
        (HostError,),
        (
            *(b"*.log\n**/[a-z]?*.{log,gz}", b"**/" * 30 + b"x", b"*a" * 100 + b"x", b"{" * 50, b"{a,b}" * 9),
            b"{a,b}" * 9 + b"[^\x97a-z]?*" * 8,
        ),
        (b"**/", b"*", b"[^", b"]", b"{", b"}", b",", b"\\", b"../", b"\n"),
    ),
    "command": Target(
        _asked,
        (),
        tuple(
            _json(request)
            for request in (
                {"verb": "run", "job": "a", "process": "b", "volumes": ["/a:writable,shared"], "env": ["A=b"]},
                *(
                    {"verb": verb, "job": "a", "process": "b"}
                    for verb in ("start", "stop", "pid", "shell", "tree", "end run", "list")
                ),
                *(
                    {"action": action, "names": ["all"], "group": "g", "wait": True}
                    for action in ("show", "quit", "start")
                ),
            )
        ),
        (b"null", b"1", b"[]", b'"a"', b"{}", b'"all"', b"../", b":", b",", b"="),
    ),
    "update_settings": Target(
        _update,
        (ShimError,),
        tuple(
            _json({"mbus": {"urls": ["nats://u:p@h:1"], "cert": cert}, "trusted_certs": _CERTIFICATE.decode() * 2})
            for cert in (_PAIR, {**_PAIR, "private_key": "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMII=\n"}, {})
        ),
        (
            b"null",
            b"-----BEGIN CERTIFICATE-----",
            b"-----END CERTIFICATE-----",
            b"\\n",
            b"MIIB",
            b"\\u0000",
            b"@[",
            b":1/",
        ),
    ),
    "text": Target(_shown, (), (b"plain", "größe \u202e \U000e0041".encode(), b"\x1b]0;a\x07\x9b\xff\0\n\r")),
}


def mutated(chance: random.Random, target: Target) -> bytes:
    """Return a mutated seed.

    Bytes are changed, removed or duplicated, tokens are inserted, or the end is replaced with the end of another seed.
    """
    data = bytearray(chance.choice(target.seeds))
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0 if data:
                data[place % len(data)] = chance.randrange(256)
            case 1:
                del data[place : place + chance.randint(1, 20)]
            case 2:
                data[place:place] = data[place : place + chance.randint(1, 60)]
            case 3 if target.words:
                data[place:place] = chance.choice(target.words)
            case 4:
                data[place:place] = bytes([chance.randrange(256)]) * chance.choice([1, 2, 64, 3000])
            case _:
                other = chance.choice(target.seeds)
                cut = chance.randrange(len(other) + 1)
                data[place:] = other[cut:]
    return bytes(data)


def findings(target: Target, chance: random.Random, until: Callable[[int], bool]) -> Iterator[tuple[bytes, str]]:
    """Yield each input that broke the parser, with a description of the failure.

    ``until`` is called with the number of inputs so far. The function returns when ``until`` returns True.
    """
    number = 0
    while not until(number):
        data = mutated(chance, target) if number >= len(target.seeds) else target.seeds[number]
        number += 1
        begun_at = time.process_time()
        try:
            target.read(data)
        except target.known:
            pass
        except Exception:  # noqa: BLE001 - any exception is a finding
            yield data, traceback.format_exc(limit=-3)
        took = time.process_time() - begun_at
        if took > SLOW:
            yield data, f"it took {took:.1f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the targets. Return 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="./dev fuzz", description=__doc__)
    parser.add_argument(
        "target", nargs="*", choices=[[], *TARGETS], metavar="TARGET", help=f"{', '.join(TARGETS)} (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for each target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args(arguments)
    total = 0
    for name in asked.target or TARGETS:
        end, count = time.monotonic() + asked.seconds, 0

        def over(number: int, end: float = end) -> bool:
            nonlocal count
            count = number
            return time.monotonic() > end

        for data, what in findings(TARGETS[name], random.Random(asked.seed), over):
            total += 1
            sys.stdout.write(f"--- {name}: {data!r:.2000}\n{what}\n")
        sys.stdout.write(f"{name}: {count} inputs, {total} findings so far (seed {asked.seed})\n")
        sys.stdout.flush()
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
