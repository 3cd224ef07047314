"""Tests HTTP transfers over real sockets: requests, responses, errors, and the redaction of secrets in errors."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import os
import shutil
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from agent_shim.bulk import transfer as transfers
from agent_shim.bulk.routes import TransferTiming
from agent_shim.bulk.transfer import Transfer
from agent_shim.core.errors import BlobError, LastingError
from agent_shim.demo.pki import EXPIRED, Authority
from tests.support import http
from tests.support.http import BlobServer, http_proxy, http_server
from tests.support.serving import serving

FAST = TransferTiming(stall=0.4, least=1024, hesitate=0.05, pause=0.01)
SURE = msgspec.structs.replace(FAST, stall=30)
"""Timeouts long enough that a server on a busy machine is not mistaken for a stalled one."""
BLOB = os.urandom(200_000)
SECRET = "sig=s3cr3t"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server(server: BlobServer) -> BlobServer:
    server.blobs["/b"] = BLOB
    return server


@pytest.fixture
async def transfer(tmp_path: Path) -> AsyncIterator[Transfer]:
    async with Transfer("", SURE, tmp_path) as transfer:
        yield transfer


async def got(transfer: Transfer, url: str, **headers: str) -> bytes:
    hasher = hashlib.sha256()
    with await transfer.download(url, headers, hasher) as file:
        file.seek(0)
        content = file.read()
    assert hasher.hexdigest() == hashlib.sha256(content).hexdigest()
    return content


async def failure(transfer: Transfer, url: str) -> str:
    with pytest.raises(BlobError) as caught:
        await got(transfer, url)
    return str(caught.value)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- GET --------------------------------------------------------------------------------------------------------------


async def test_blob_url_is_requested_unchanged(server: BlobServer, transfer: Transfer) -> None:
    """The URL may contain a signature, which is valid only for the URL's exact spelling."""
    query = "a=%2f%2F&b=1+2%20&c=~%7e&X=%3d=&sig=a%2Bb%3D"
    assert await got(transfer, f"{server.url}/b?{query}", extra="header") == BLOB

    assert server.requests[0].target == f"/b?{query}"
    assert server.requests[0].headers["extra"] == "header"
    assert server.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.attack("a blobstore redirects endlessly or to a file, or stalls")
@pytest.mark.parametrize(
    ("how", "blob"),
    [(http.NO_LENGTH, BLOB), (http.ENCODED, gzip.compress(BLOB)), (http.DRIBBLE, b"slow and steady")],
    ids=["without a length", "encoded", "slow but steady"],
)
async def test_transfer_reads_the_whole_response_body_without_decoding(
    server: BlobServer, tmp_path: Path, how: str, blob: bytes
) -> None:
    """The digest is computed from the bytes that were sent, even if the server declares an encoding."""
    server.blobs["/b"] = blob
    server.plan = [how]
    async with Transfer("", msgspec.structs.replace(FAST, least=1), tmp_path) as transfer:
        assert await got(transfer, f"{server.url}/b") == blob


async def test_redirected_download_sends_the_password_only_to_the_original_host(
    server: BlobServer, transfer: Transfer
) -> None:
    async with http_server() as other:
        other.blobs["/c"] = b"there"
        server.plan = [f"redirect:{other.url}/c?{SECRET}"]

        assert await got(transfer, f"{server.url}/b", authorization=http.basic("me:word")) == b"there"
        assert "authorization" not in other.requests[0].headers
    assert server.requests[0].headers["authorization"] == http.basic("me:word")


@pytest.mark.attack("a reader finds arguments, values or signed URLs in an audit record or an error")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("404", "Error executing GET, response was 404 from HOST"),
        ("500", "Error executing GET, response was 500 from HOST"),
        ("300", "Error executing GET, response was 300 from HOST"),
        (http.HALF, "Excuting GET request: HOST: the body ended too early"),
    ],
)
async def test_error_for_a_failed_get_names_host_and_reason(
    server: BlobServer, transfer: Transfer, how: str, text: str
) -> None:
    """The error must contain neither the URL's password nor its query."""
    server.plan = [how]
    said = await failure(transfer, f"http://me:word@{server.host}/b?{SECRET}")

    assert said == text.replace("HOST", server.host)


@pytest.mark.parametrize("how", [http.STALL, http.SILENT, http.DRIBBLE])
async def test_stalled_get_times_out(server: BlobServer, tmp_path: Path, how: str) -> None:
    server.plan = [how]
    async with asyncio.timeout(30), Transfer("", FAST, tmp_path) as transfer:
        said = await failure(transfer, f"http://me:word@{server.host}/b?{SECRET}")

    assert said == f"Excuting GET request: {server.host}: it stalled"


@pytest.mark.attack("a reader finds arguments, values or signed URLs in an audit record or an error")
@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:1/b?" + SECRET, "Excuting GET request: 127.0.0.1:1: Connection refused"),
        ("http://name.invalid/b?" + SECRET, "Excuting GET request: name.invalid:80: "),
        ("gopher://h/b?" + SECRET, "Excuting GET request: h:None: "),
        ("http://[bad/b?" + SECRET, "Excuting GET request: the host: "),
        ("http:///b?" + SECRET, "Excuting GET request: "),
        ("", "Excuting GET request: "),
    ],
)
async def test_transfer_error_names_an_unreachable_host_or_proxy(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch, url: str, text: str
) -> None:
    said = await failure(transfer, url)

    assert said.startswith(text)
    assert "s3cr3t" not in said
    monkeypatch.setenv("HTTP_PROXY", "http://me:word@127.0.0.1:1")
    gone = "blobs.example:80: its proxy 127.0.0.1:1 cannot be reached: Connection refused"
    assert await failure(transfer, "http://blobs.example/b") == f"Excuting GET request: {gone}"


@pytest.mark.attack("a blobstore redirects endlessly or to a file, or stalls")
async def test_download_redirects_are_followed_up_to_a_limit(server: BlobServer, transfer: Transfer) -> None:
    server.plan = [f"redirect:{server.url}/b?{SECRET}"] * 20

    assert await failure(transfer, f"{server.url}/b") == (
        f"Excuting GET request: {server.host}: it redirects again and again"
    )


# --- PUT --------------------------------------------------------------------------------------------------------------


async def put(transfer: Transfer, url: str, data: bytes, where: Path, **headers: str) -> None:
    (where / "upload").write_bytes(data)
    with (where / "upload").open("rb") as source:
        await transfer.upload(url, source, headers)


@pytest.mark.parametrize("continues", [True, False])
async def test_put_sends_the_file_length(
    server: BlobServer, transfer: Transfer, tmp_path: Path, continues: bool
) -> None:
    server.continues = continues
    await put(transfer, f"{server.url}/new?{SECRET}", BLOB, tmp_path, extra="header", ACCEPT="text/plain")
    await put(transfer, f"{server.url}/empty", b"", tmp_path)
    request, of_nothing = server.requests

    assert server.blobs["/new"] == BLOB
    assert (request.method, request.target) == ("PUT", f"/new?{SECRET}")
    wanted = {"accept": "text/plain", "expect": "100-continue", "content-length": str(len(BLOB)), "extra": "header"}
    assert wanted.items() <= request.headers.items()
    assert "transfer-encoding" not in request.headers
    assert server.blobs["/empty"] == b""
    assert (of_nothing.headers["accept"], of_nothing.headers["content-length"]) == ("*/*", "0")


@pytest.mark.parametrize("how", ["403", "307", "redirect:http://127.0.0.1:1/"])
async def test_error_for_a_rejected_put_contains_the_status(
    server: BlobServer, transfer: Transfer, tmp_path: Path, how: str
) -> None:
    """The server may answer before it has read the whole file."""
    server.plan = [how]
    with pytest.raises(BlobError) as caught:
        await put(transfer, f"{server.url}/new?{SECRET}", os.urandom(5_000_000), tmp_path)

    status = how if how.isdigit() else "302"
    assert str(caught.value) == f"Error executing PUT, response was {status} from {server.host}"
    assert len(server.requests) == 1


async def test_put_waits_for_a_slow_answer(server: BlobServer, transfer: Transfer, tmp_path: Path) -> None:
    """After an upload, a server may take longer to answer than the time limit for a stalled transfer."""
    server.plan = [http.THINK]
    await put(transfer, f"{server.url}/new", BLOB, tmp_path)

    assert server.blobs["/new"] == BLOB


@pytest.mark.parametrize(("how", "size"), [(http.DEAF, 50_000_000), (http.SILENT, 200_000)])
async def test_put_times_out_if_the_server_does_not_read_or_answer(
    server: BlobServer, tmp_path: Path, how: str, size: int
) -> None:
    server.plan = [how]
    async with Transfer("", msgspec.structs.replace(FAST, answer=0.2), tmp_path) as transfer:
        with pytest.raises(BlobError, match=f"^Executing PUT request: {server.host}: it stalled$"):
            await put(transfer, f"{server.url}/new?{SECRET}", bytes(size), tmp_path)


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.mark.attack("a neighbour poses as the blobstore")
async def test_configured_blobstore_ca_replaces_the_system_cas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a CA is configured, certificates signed by one of the system's CAs must be rejected."""
    authority, system = Authority("blobstore-ca"), Authority("system-ca")
    (tmp_path / "system.pem").write_text(system.ca)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "system.pem"))
    async with http_server(tmp_path, system.server()) as server:
        server.blobs["/b"] = BLOB
        async with Transfer("", SURE, tmp_path) as of_system, Transfer(authority.ca, SURE, tmp_path) as of_settings:
            assert await got(of_system, f"{server.url}/b") == BLOB
            assert "its certificate is not trusted" in await failure(of_settings, f"{server.url}/b")
    async with http_server(tmp_path, authority.server()) as server:
        server.blobs["/b"] = BLOB
        async with Transfer(authority.ca, SURE, tmp_path) as trusting:
            assert await got(trusting, f"{server.url}/b") == BLOB
        for ca in ("", Authority("another").ca):
            async with Transfer(ca, SURE, tmp_path) as doubting:
                said = await failure(doubting, f"{server.url}/b?{SECRET}")
                assert said.startswith(f"Excuting GET request: {server.host}: its certificate is not trusted: ")
                assert "s3cr3t" not in said


@pytest.mark.attack("a neighbour poses as the blobstore")
@pytest.mark.parametrize("wrong", ["host", "time"])
async def test_blobstore_certificate_for_another_host_or_outside_its_validity_is_rejected(
    tmp_path: Path, wrong: str
) -> None:
    authority = Authority("blobstore-ca")
    pair = authority.server(hosts=["other.example"]) if wrong == "host" else authority.server(valid=EXPIRED)
    async with http_server(tmp_path, pair) as server, Transfer(authority.ca, SURE, tmp_path) as transfer:
        said = await failure(transfer, f"{server.url}/b")

    assert ("IP address mismatch" if wrong == "host" else "certificate has expired") in said


@pytest.mark.attack("a blobstore sends endless data")
async def test_downloading_an_endless_blob_fails_before_the_disk_is_full(
    server: BlobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "RESERVE_BYTES", shutil.disk_usage(tmp_path).free - (32 << 20))
    monkeypatch.setattr(transfers, "RESERVED_PART", 1)
    server.plan = [http.ENDLESS]
    async with Transfer("", SURE, tmp_path) as transfer:
        with pytest.raises(LastingError, match="No space left on device, [0-9]+ MiB are free"):
            await transfer.download(f"{server.url}/b", {}, hashlib.sha256())


@pytest.mark.attack("a request is malformed, or has a value of the wrong type")
@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("https://", {}),
        ("http://[::1", {}),
        ("http://127.0.0.1:99999/", {}),
        ("file:///etc/passwd", {}),
        ("../../x", {}),
        ("{url}/a\0b", {}),
        ("{url}/", {"a": "b\r\nc: d"}),
    ],
)
async def test_invalid_request_url_or_header_is_rejected_without_retries(
    server: BlobServer, tmp_path: Path, url: str, headers: dict[str, str]
) -> None:
    """Pauses between retries would delay all other requests."""
    async with Transfer("", SURE, tmp_path) as transfer:
        with pytest.raises(LastingError, match="the URL or a header cannot be used$"):
            await transfer.download(url.format(url=server.url), headers, hashlib.sha256())


@pytest.mark.attack("a request contains certificates or keys that the agent cannot use")
@pytest.mark.parametrize("ca", ["s3cr3t", "s3cr3t é"])
async def test_invalid_blobstore_ca_is_reported(tmp_path: Path, ca: str) -> None:
    with pytest.raises(BlobError, match="^cannot use the CA of the blobstore: it is not a PEM certificate$"):
        Transfer(ca, FAST, tmp_path)


# --- proxies ----------------------------------------------------------------------------------------------------------


async def test_proxy_variables_are_used_with_their_password(
    server: BlobServer, transfer: Transfer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("agent_shim.bulk.routes.is_excepted", lambda *_: False)
    authority = Authority("blobstore-ca")
    async with (
        http_proxy() as proxy,
        http_server(tmp_path, authority.server()) as secure,
        Transfer(authority.ca, SURE, tmp_path) as trusting,
    ):
        for name in ("HTTP_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://me:word@127.0.0.1:{proxy.port}")
        secure.blobs["/b"] = b"secure"

        assert await got(transfer, f"{server.url}/b?q") == BLOB
        assert await got(trusting, f"{secure.url}/b") == b"secure"
        assert [(seen.method, seen.target) for seen in proxy.seen] == [
            ("GET", f"{server.url}/b?q"),
            ("CONNECT", secure.host),
        ]
        assert {seen.headers["proxy-authorization"] for seen in proxy.seen} == {http.basic("me:word")}


async def test_transfer_client_closes_all_connections(server: BlobServer, tmp_path: Path) -> None:
    async with Transfer("", msgspec.structs.replace(SURE, stall=3), tmp_path) as transfer:
        before = open_files()
        server.plan = ["404", http.HALF, http.STALL, ""]
        for _ in range(3):
            await failure(transfer, f"{server.url}/b")
        await got(transfer, f"{server.url}/b")
        await asyncio.sleep(0.1)

        assert open_files() <= before + 1


async def test_downloads_do_not_wait_for_each_other(server: BlobServer, transfer: Transfer) -> None:
    """``env.bosh.parallel`` may exceed any limit of the HTTP client. A download that waited would count as stalled."""
    server.delay = 1

    await asyncio.gather(*(got(transfer, f"{server.url}/b") for _ in range(12)))

    assert server.busiest == 12


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


MOST = 1_000_000
"""Maximum amount of memory, in bytes, that a response is allowed to occupy. The server sends three times as much."""


@pytest.mark.attack("a blobstore redirects endlessly or to a file, or stalls")
@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (b"HTTP/1.1 200 ", b"x" * 10_000),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\na: ", b"x" * 10_000),
        (b"", b"HTTP/1.1 102 Processing\r\na: b\r\n\r\n" * 100),
        (CHUNKED + b"3;", b"x" * 10_000),
        (CHUNKED, b"0" * 10_000),
        (CHUNKED + b"3\r\nabc\r\n0\r\n", b"a: b\r\n" * 1000),
        (CHUNKED + b"3\r\nabc\r\n0\r\na: ", b"x" * 10_000),
        (b"HTTP/1.1 401 No\r\nContent-Length: 100000000000\r\n\r\n", b"x" * 10_000),
    ],
    ids=["reason", "headers", "header", "interim", "extension", "size", "trailers", "trailer", "error"],
)
async def test_endless_transfer_response_is_not_kept_in_memory(
    transfer: Transfer, begin: bytes, endless: bytes
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await http.read_head(reader)
        writer.write(begin)
        with contextlib.suppress(OSError):
            for _ in range(3 * MOST // len(endless)):
                writer.write(endless)
                await writer.drain()
                await asyncio.sleep(0)

    async with serving(talk) as port:
        tracemalloc.start()
        try:
            await failure(transfer, f"http://127.0.0.1:{port}/b")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak < MOST
