"""Tests the owners and modes of bundles (jobs and packages) that are unpacked below the real ``/var/vcap``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machine import machine

pytestmark = pytest.mark.root

INSIDE = """
import asyncio, gzip, hashlib, io, json, os, tarfile
from agent_shim.services.bundles import Bundle, Bundles
from agent_shim.bulk.protocol import BlobRef
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore

paths = Paths()
for directory in (paths.tmp, paths.blobs, paths.sensitive_blobs):
    directory.mkdir(parents=True)

def blob(*names):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.uid = info.gid = 1234
            if name.endswith("link"):
                info.type, info.linkname = tarfile.SYMTYPE, "monit"
            tar.addfile(info)
    data = gzip.compress(out.getvalue())
    (paths.blobs / str(len(names))).write_bytes(data)
    return BlobRef(str(len(names)), digest=hashlib.sha1(data).hexdigest())

job = Bundle("job", "web", "1", blob("./web/monit", "./web/bin/run", "./web/link"))
package = Bundle("package", "ruby", "1", blob("./bin/ruby"))
bundles = Bundles(paths)

async def main():
    await bundles.install([job, package], Blobstore(), 2)
    await bundles.activate([job], [package])
    await bundles.make_job_dirs(["web"])
    await bundles.keep_blob("3", hashlib.sha1(b"x").hexdigest(), b"x")

asyncio.run(main())
places = {
    "job": bundles.path(job), "package": bundles.path(package), "jobs": paths.jobs, "packages": paths.packages,
    "versions of the job": bundles.path(job).parent, "versions of the package": bundles.path(package).parent,
    "links of the job": paths.jobs / "web/packages", "log": paths.log / "web", "run": paths.run / "web",
    "data": paths.data / "web", "monit": paths.jobs / "web/monit", "run script": paths.jobs / "web/bin/run",
    "bin": paths.jobs / "web/bin", "link": paths.jobs / "web/link", "ruby": paths.packages / "ruby/bin/ruby",
}
print(json.dumps({
    name: "%o %d:%d" % (status.st_mode & 0o7777, status.st_uid, status.st_gid)
    for name, status in ((name, os.lstat(path)) for name, path in places.items())
}))
"""


def test_bundle_owners_and_modes_match_the_go_agent(tmp_path: Path) -> None:
    """Files that jobs may read must belong to the vcap group, and all other files to the root group, whatever the
    archive says.
    """
    with machine(tmp_path) as inside:
        done = inside.popen([sys.executable, "-c", INSIDE], stdout=subprocess.PIPE)
        out, _ = done.communicate(timeout=60)

    assert json.loads(out) == {
        "job": "750 0:1000",
        "package": "755 0:1000",
        "jobs": "750 0:1000",
        "packages": "755 0:1000",
        "versions of the job": "750 0:1000",
        "versions of the package": "755 0:1000",
        "links of the job": "755 0:1000",
        "log": "770 0:1000",
        "run": "770 0:1000",
        "data": "770 0:1000",
        "monit": "640 0:1000",
        "run script": "750 0:1000",
        "bin": "750 0:1000",
        "link": "777 0:1000",
        "ruby": "644 0:0",
    }
