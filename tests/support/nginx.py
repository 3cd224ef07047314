"""Runs nginx (Debian package nginx) with a configuration like that of the blobstore on a Director's VM.

Blobs are stored in ``store/XX/ID``. Below ``/``, the ``agent`` user may GET and PUT blobs with a password. Below
``/signed/`` no password is needed, but a link is valid only for one method, one blob and a limited time.

The Director's nginx verifies signed links with an HMAC module that Debian does not package. Here they are verified by a
module that is part of nginx, with a hash over the same arguments in the same order.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agent_shim.demo.pki import Authority
from agent_shim.host import process
from tests.support.waiting import TIMEOUT_S

SECRET = "n0b0dy-kn0ws"

CONFIG = """
{user}
daemon off;
worker_processes 1;
pid {where}/nginx.pid;
error_log {where}/error.log notice;
events {{}}
http {{
  access_log {where}/access.log combined;
  client_body_temp_path {where}/body;
  proxy_temp_path {where}/proxy;
  fastcgi_temp_path {where}/fastcgi;
  uwsgi_temp_path {where}/uwsgi;
  scgi_temp_path {where}/scgi;
  client_max_body_size 5000m;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {where}/server.pem;
    ssl_certificate_key {where}/server.pem;
    ssl_protocols TLSv1.2;
    ssl_ciphers ECDHE-RSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384;
    ssl_prefer_server_ciphers on;
    root {where}/store;

    location / {{
      auth_basic "blobs";
      auth_basic_user_file {where}/users;
      dav_methods PUT;
      create_full_put_path on;
      dav_access user:rw;
    }}

    location ~* ^/signed/(?<object_id>.+)$ {{
      if ($request_method !~ ^(GET|PUT|HEAD)$) {{ return 405; }}
      secure_link $arg_st,$arg_e;
      secure_link_md5 "$request_method$object_id$arg_ts$arg_e {secret}";
      if ($secure_link = "") {{ return 403; }}
      if ($secure_link = "0") {{ return 410; }}
      rewrite ^/signed/(.*)$ /internal/$object_id;
    }}

    location /internal/ {{
      internal;
      alias {where}/store/;
      dav_methods PUT;
      create_full_put_path on;
      dav_access user:rw;
    }}
  }}
}}
"""


def shard(blob_id: str) -> str:
    """Return the name of a blob's directory."""
    return hashlib.sha1(blob_id.encode()).hexdigest()[:2]


@dataclass
class Nginx:
    """A running nginx. ``ca`` is the CA certificate that clients have to trust."""

    where: Path
    port: int
    ca: str
    server: process.Process | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def path(self, blob_id: str) -> Path:
        """Return the path of a blob."""
        return self.where / "store" / shard(blob_id) / blob_id

    def keep(self, blob_id: str, content: bytes) -> None:
        """Store a blob directly, without the server."""
        self.path(blob_id).parent.mkdir(parents=True, exist_ok=True)
        self.path(blob_id).write_bytes(content)

    def users(self, **passwords: str) -> None:
        """Replace the users and passwords that nginx accepts. This takes effect immediately, because nginx reads the
        password file for every request.
        """
        lines = [f"{name}:{{PLAIN}}{password}\n" for name, password in passwords.items()]
        (self.where / "users").write_text("".join(lines))

    def options(self, password: str) -> dict[str, object]:
        """Return the options that the Director would write for this server as a ``dav`` blobstore."""
        return {
            "endpoint": self.url,
            "user": "agent",
            "password": password,
            "retry_attempts": 5,
            "tls": {"cert": {"ca": self.ca}},
        }

    def signed(self, method: str, blob_id: str, *, seconds: float = 3600) -> str:
        """Return a signed link to a blob. The link allows only ``method``, and expires after ``seconds``."""
        now = int(time.time())
        end, object_id = int(now + seconds), f"{shard(blob_id)}/{blob_id}"
        digest = hashlib.md5(f"{method}{object_id}{now}{end} {SECRET}".encode()).digest()
        signature = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        return f"{self.url}/signed/{object_id}?e={end}&st={signature}&ts={now}"

    def requests(self) -> list[tuple[str, int]]:
        """Return the method and the response status of each request so far."""
        lines = (self.where / "access.log").read_text().splitlines()
        return [(line.split('"')[1].split()[0], int(line.split('"')[2].split()[0])) for line in lines]


@asynccontextmanager
async def nginx(where: Path) -> AsyncIterator[Nginx]:
    """Run a server, initially without users."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "nginx is missing: apt-get install --no-install-recommends nginx"
    (where / "store").mkdir(parents=True)
    authority = Authority("blobstore-ca", bits=2048)
    pair = authority.server()
    (where / "server.pem").touch(mode=0o600)
    (where / "server.pem").write_text(pair.certificate + pair.private_key)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = Nginx(where, port, authority.ca)
    made.users()
    user = "user root;" if os.geteuid() == 0 else ""
    (where / "nginx.conf").write_text(CONFIG.format(user=user, where=where, port=port, secret=SECRET))
    running = process.spawn(
        [program, "-c", str(where / "nginx.conf"), "-p", str(where), "-e", str(where / "error.log")],
        env=dict(os.environ),
        stdout=where / "out",
        stderr=where / "out",
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not _answers(port):
                assert running.is_alive, (where / "out").read_text()
                await asyncio.sleep(0.01)
        yield made
    finally:
        running.send(signal.SIGTERM)
        await running.terminate(10)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
