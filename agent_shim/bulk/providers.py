"""Implements the blobstore providers that the settings can name (bosh-utils blobstore/provider.go)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol
from urllib.parse import quote

import msgspec

from agent_shim.bulk.protocol import scratch
from agent_shim.core import wire
from agent_shim.core.digest import Hasher
from agent_shim.core.errors import BlobError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.host import files, process
from agent_shim.host.descriptors import closing

if TYPE_CHECKING:
    from agent_shim.bulk.transfer import Transfer

CREATE_ENV_CACHE: Final = "/var/vcap/micro_bosh/data/cache"
"""The blobstore path in create-env manifests. It refers to the directory that the agent serves under ``/blobs``
(app/app.go).
"""

PROGRAM_TIMEOUT_S: Final = 3600.0
"""Timeout for an external program. It is long because the program does not report progress."""
GRACE_S: Final = 2.0
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Provider(Protocol):
    """A blobstore. Both methods raise ``BlobError`` or ``OSError`` and can be retried."""

    async def get(self, blob_id: str, hasher: Hasher) -> BinaryIO:
        """Return a blob's content as an open file, and feed the content to ``hasher``. The caller closes the file."""

    async def put(self, blob_id: str, path: Path) -> None:
        """Store the content of ``path`` under ``blob_id``. The caller ensures that the id is unused and that
        the file does not change.
        """


def environment(store: Blobstore) -> dict[str, str]:
    """Return this process's environment with the proxy variables from the settings, in upper and lower case."""
    return {**os.environ, **store.proxies, **{name.upper(): value for name, value in store.proxies.items()}}


def provider(store: Blobstore, paths: Paths, transfer: Callable[[], Transfer]) -> Provider:
    """Return the provider that the settings name. ``transfer`` creates the HTTP client on demand."""
    match store.provider:
        case "dummy":
            return Dummy()
        case "local":
            return Local(local_directory(store, paths))
        case "dav":
            return Dav(_dav_options(store), transfer)
        case name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            return External(name, store.options, environment(store), paths)
    raise BlobError(f"cannot use the blobstore {store.provider[:40]!r}: unknown provider")


class Dummy:
    """A blobstore that accepts every blob and stores none."""

    async def get(self, blob_id: str, hasher: Hasher) -> BinaryIO:  # noqa: ARG002 - required by the protocol
        raise BlobError(f"cannot get {blob_id}: the blobstore is a dummy")

    async def put(self, blob_id: str, path: Path) -> None:
        pass


class Local:
    """A blobstore in a directory with one file for each blob (local_blobstore.go)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def get(self, blob_id: str, hasher: Hasher) -> BinaryIO:
        return await opened(self._directory / blob_id, hasher)

    async def put(self, blob_id: str, path: Path) -> None:
        await asyncio.to_thread(self._copy, path, self._directory / blob_id)

    def _copy(self, path: Path, target: Path) -> None:
        """Store a copy of ``path`` as the blob ``target``. The blobstore's directory is created if it is missing."""
        if not self._directory.is_dir():
            files.make_dir(self._directory, 0o770)
        with (
            path.open("rb") as source,
            files.attempting(f"write {target}"),
            files.replacing(target, mode=0o640) as out,
        ):
            files.copy_data(source.fileno(), out.fileno())


class DavOptions(msgspec.Struct, frozen=True):
    """Options of bosh-davcli, except those for signing."""

    endpoint: str
    user: str = ""
    password: str = ""

    def url(self, blob_id: str) -> str:
        """Return the URL of a blob. The first byte of the id's SHA-1 digest selects one of 256 directories."""
        shard = hashlib.sha1(blob_id.encode(), usedforsecurity=False).hexdigest()[:2]
        return f"{self.endpoint.rstrip('/')}/{shard}/{quote(blob_id, safe='')}"

    def headers(self) -> dict[str, str]:
        """Return the headers that each request needs."""
        if not self.user:
            return {}
        pair = f"{self.user}:{self.password}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}


class Dav:
    """WebDAV as the Director's blobstore serves it (bosh-davcli client/client.go)."""

    def __init__(self, options: DavOptions, transfer: Callable[[], Transfer]) -> None:
        self._options = options
        self._transfer = transfer

    async def get(self, blob_id: str, hasher: Hasher) -> BinaryIO:
        return await self._transfer().download(self._options.url(blob_id), self._options.headers(), hasher)

    async def put(self, blob_id: str, path: Path) -> None:
        with path.open("rb") as source:
            await self._transfer().upload(self._options.url(blob_id), source, self._options.headers())


class External:
    """A ``bosh-blobstore-NAME`` program that reads its options from a file (external_blobstore.go)."""

    def __init__(self, name: str, options: dict[str, Any], environment: Mapping[str, str], paths: Paths) -> None:
        self._program = f"bosh-blobstore-{name}"
        self._options = options
        self._config = paths.bosh_etc / f"blobstore-{name}.json"
        self._scratch = scratch(paths, os.getpid())
        self._path = f"{paths.bosh_bin}:{environment.get('PATH') or DEFAULT_PATH}"
        self._environment = {**environment, "PATH": self._path}

    async def get(self, blob_id: str, hasher: Hasher) -> BinaryIO:
        # Use a directory, so that any files that the program adds are removed together with the blob.
        directory = files.sibling(self._scratch)
        directory.mkdir(0o700)
        try:
            (directory / "blob").touch(0o600)  # with the Go agent, the file exists before the program runs
            await self._run("get", blob_id, str(directory / "blob"))
            return await opened(directory / "blob", hasher)
        finally:
            files.remove_tree(directory)

    async def put(self, blob_id: str, path: Path) -> None:
        await self._run("put", str(path), blob_id)

    async def _run(self, *arguments: str) -> None:
        """Run the program. If it fails, raise a ``BlobError`` with the Go agent's message and the end of the output."""
        program = shutil.which(self._program, path=self._path)
        if program is None:
            raise BlobError(f"executable {self._program} not found in PATH")
        await self._write_config()
        what = f"Shelling out to {self._program} cli"
        with closing(os.memfd_create("output")) as output:
            argv = [program, "-c", str(self._config), *arguments]
            running = process.spawn(argv, env=self._environment, stdout=output, stderr=output)
            try:
                async with asyncio.timeout(PROGRAM_TIMEOUT_S):
                    status = await running.wait_or_terminate(GRACE_S)
            except TimeoutError as exc:
                raise BlobError(f"{what}: it took longer than {PROGRAM_TIMEOUT_S:.0f} seconds") from exc
            if status != 0:
                begin = max(0, os.fstat(output).st_size - MAX_OUTPUT_BYTES)
                text = os.pread(output, MAX_OUTPUT_BYTES, begin).decode(errors="replace")
                raise BlobError(f"{what}: it ended with code {status}: {harmless(text, self._options)}")

    async def _write_config(self) -> None:
        """Write the options to the same file as the Go agent does, readable only by root."""
        content = msgspec.json.encode(self._options)
        await asyncio.to_thread(files.write_atomic, self._config, content, mode=0o600, if_changed=True)


async def opened(path: Path, hasher: Hasher) -> BinaryIO:
    """Open a blob (:func:`open_blob`) and feed it to ``hasher``. Afterwards, the file position is at the end. Raises
    ``BlobError`` for a link or a directory.
    """
    file = open_blob(path)

    def feed() -> None:
        while chunk := file.read(files.CHUNK_BYTES):
            hasher.update(chunk)

    try:
        await asyncio.to_thread(feed)
    except BaseException:
        file.close()
        raise
    return file


def open_blob(path: Path) -> BinaryIO:
    """Open a blob in one of the agent's own directories or in a local blobstore. Raises ``BlobError``.

    The file may belong to a job. Therefore no link is followed, and if the file's owner has a lease on it, opening it
    fails instead of waiting for the lease.
    """
    try:
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError as exc:
        raise BlobError(f"cannot open {path}: {exc.strerror}") from exc


class _Ca(msgspec.Struct, frozen=True):
    ca: str = ""


class _Tls(msgspec.Struct, frozen=True):
    cert: _Ca = _Ca()


class _TlsOptions(msgspec.Struct, frozen=True):
    tls: _Tls = _Tls()


def trusted_ca(store: Blobstore) -> str:
    """Return ``options.tls.cert.ca``, or "" if the options have a different form (blobstore_http_client.go)."""
    try:
        return wire.convert(store.options, _TlsOptions).tls.cert.ca
    except msgspec.ValidationError:
        return ""


def _dav_options(store: Blobstore) -> DavOptions:
    try:
        return wire.convert(store.options, DavOptions)
    except msgspec.ValidationError as exc:
        raise BlobError(f"cannot use the blobstore {store.provider}: {exc}") from exc


def local_directory(store: Blobstore, paths: Paths) -> Path:
    """Return the directory of a local blobstore. The path that create-env manifests use stands for the agent's own blob
    directory. Raises ``BlobError`` if the options name no directory.
    """
    directory = store.options.get("blobstore_path")
    if directory is None:
        raise BlobError("Validating blobstore: missing blobstore_path")
    if not isinstance(directory, str):
        raise BlobError("Validating blobstore: blobstore_path must be a string")
    return paths.blobs if directory == CREATE_ENV_CACHE else paths.moved(Path(directory))


# --- program output ---------------------------------------------------------------------------------------------------

NO_SECRET: Final = frozenset(
    {"endpoint", "host", "region", "bucket_name", "container_name", "account_name", "environment", "storage_class"}
)
"""Options whose values need not be hidden in errors. All other values are treated as secrets."""

MAX_ERROR_CHARS: Final = 1000
MAX_OUTPUT_BYTES: Final = 1024 * 1024
"""Maximum number of bytes read from a failed program's output. This is much more than an error shows, so that an error
never contains half a secret that was cut off at this limit.
"""


def harmless(text: str, options: dict[str, Any]) -> str:
    """Return the end of a program's output, with secret option values and the users and queries of URLs removed."""
    for secret in sorted(_texts(options), key=len, reverse=True):
        text = text.replace(secret, "…")
    text = re.sub(r"(\w://)[^/@\s]*@", r"\1", text)
    text = re.sub(r"(\w://[^\s?]*)\?[^\s\"']*", r"\1", text)
    return " ".join(text.split())[-MAX_ERROR_CHARS:]


def _texts(value: Any, name: str = "") -> Iterator[str]:
    """Yield the secrets in an option's value, each in every form in which a program may print it: unchanged, as JSON,
    and line by line. ``name`` is the innermost key above the value.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, name)
    elif isinstance(value, str) and len(value) > 3 and name not in NO_SECRET:  # shorter ones may be part of any word
        yield value
        yield msgspec.json.encode(value).decode()[1:-1]
        yield from (line for line in value.splitlines() if len(line) > 3)
