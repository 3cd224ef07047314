"""Creates a small release whose jobs run real servers. Its templates are rendered for a base directory other than
/var/vcap.
"""

from __future__ import annotations

import hashlib
import io
import shlex
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MODE: Final = {True: 0o755, False: 0o644}
"""Maps whether a file is executable to its mode."""

_STORE: Final = '''
import http.server, sys

counts = {}

class Store(http.server.BaseHTTPRequestHandler):
    """PUT /name counts one more and answers how many there were."""
    def do_PUT(self):
        counts[self.path] = counts.get(self.path, 0) + 1
        body = str(counts[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Store).serve_forever()
'''

_GREETER: Final = '''
import http.server, os, sys, urllib.request

port, store = int(sys.argv[1]), sys.argv[2]

class Greeter(http.server.BaseHTTPRequestHandler):
    """GET /crash ends the process; any other path greets, counting visitors in the store."""
    def do_GET(self):
        if self.path == "/crash":
            os._exit(3)
        visitor = "stranger"
        if store:
            count = urllib.request.Request(store + "/visitors", method="PUT")
            visitor = "visitor " + urllib.request.urlopen(count, timeout=5).read().decode()
        body = f"hello, {visitor}\\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", port), Greeter).serve_forever()
'''

_CTL: Final = """
#!/bin/bash
run={shell_base}/sys/run/{job}
log={shell_base}/sys/log/{job}
case $1 in
start)
  echo $$ > "$run/{job}.pid"
  server={shell_base}/packages/{package}/bin/server.py
  exec {python} -I "$server" {arguments} >> "$log/{job}.stdout.log" 2>> "$log/{job}.stderr.log"
  ;;
stop)
  kill "$(cat "$run/{job}.pid")"
  rm -f "$run/{job}.pid"
  ;;
esac
"""

_MONIT: Final = """
check process {job}
  with pidfile "{base}/sys/run/{job}/{job}.pid"
  start program "'{base}/jobs/{job}/bin/ctl' start" with timeout 30 seconds
  stop program "'{base}/jobs/{job}/bin/ctl' stop"
  group vcap
{depends}
"""

_PRE_START: Final = """
#!/bin/bash
echo "preparing {job}"
touch {shell_base}/data/{job}/prepared
"""

_DRAIN: Final = """
#!/bin/bash
echo "$(date +%s) drain $*" >> {shell_base}/sys/log/{job}/drain.log
echo 1
"""

_ERRAND: Final = """
#!/bin/bash
{python} -I -c 'import urllib.request; print(urllib.request.urlopen("{web}", timeout=5).read().decode(), end="")'
"""


def archive(files: Mapping[str, str | bytes]) -> bytes:
    """Return a gzipped tarball.

    Files below ``bin/`` are executable. Newlines at the start of a file's content are dropped.
    """
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as packed:
        for name, text in files.items():
            content = text if isinstance(text, bytes) else text.lstrip("\n").encode()
            member = tarfile.TarInfo(f"./{name}")
            member.size, member.mode = len(content), MODE["bin/" in name]
            packed.addfile(member, io.BytesIO(content))
    return target.getvalue()


@dataclass(frozen=True)
class DemoRelease:
    """The release: three jobs with servers, an errand and two packages.

    ``blobs`` are uploaded to the blobstore, while ``templates`` are sent over the bus.
    """

    base: Path
    ports: Mapping[str, int]
    blobs: dict[str, bytes] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Return the URL of the web job."""
        return f"http://127.0.0.1:{self.ports['web']}/"

    @property
    def flaky_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['flaky']}/"

    def templates(self) -> bytes:
        """Return the rendered templates of all jobs, as the Director sends them."""
        store = f"http://127.0.0.1:{self.ports['store']}"
        files: dict[str, str | bytes] = {
            **self._job("store", "keyvalue", f"{self.ports['store']}"),
            **self._job("web", "greeter", f"{self.ports['web']} {store}", depends="store"),
            **self._job("flaky", "greeter", f"{self.ports['flaky']} ''"),
            "smoke/monit": "",
            "smoke/bin/run": _ERRAND.format(python=shlex.quote(sys.executable), web=self.url),
        }
        return archive(files)

    def _job(self, job: str, package: str, arguments: str, *, depends: str = "") -> dict[str, str]:
        """Return a job's rendered templates by path. The job runs ``package`` with ``arguments``."""
        words = {"base": self.base, "job": job, "package": package, "arguments": arguments}
        words |= {"shell_base": shlex.quote(str(self.base)), "python": shlex.quote(sys.executable)}
        words["depends"] = f"  depends on {depends}" if depends else ""
        files = {"monit": _MONIT, "bin/ctl": _CTL, "bin/pre-start": _PRE_START, "bin/drain": _DRAIN}
        return {f"{job}/{name}": text.format(**words) for name, text in files.items()}

    def packages(self) -> dict[str, Any]:
        """Return the packages for the spec, after adding their archives to ``blobs``."""
        found = {}
        for name, source in (("keyvalue", _STORE), ("greeter", _GREETER)):
            content = archive({"bin/server.py": source})
            blob_id = f"blob-{name}"
            self.blobs[blob_id] = content
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            found[name] = {"name": name, "version": "1.1", "sha1": digest, "blobstore_id": blob_id}
        return found

    def spec(self, agent_id: str, networks: dict[str, Any]) -> dict[str, Any]:
        """Return the full spec, except for the rendered templates, whose blob id changes with each upload."""
        jobs = [{"name": name, "version": "1"} for name in ("store", "web", "flaky", "smoke")]
        return {
            "deployment": "demo",
            "job": {"name": "front", "template": "store", "version": "1", "templates": jobs},
            "index": 0,
            "id": f"instance-of-{agent_id}",
            "name": "front",
            "az": "z1",
            "networks": networks,
            "packages": self.packages(),
            "configuration_hash": "1",
            "persistent_disk": 0,
        }
