"""The image can be built if the package index's certificate was signed by a private CA."""

from __future__ import annotations

import functools
import http.server
import shutil
import ssl
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.pods import Podman
from tests.support.source import ROOT

pytestmark = [pytest.mark.image, pytest.mark.early]  # Building an image takes minutes.

PARTS = (
    *("Dockerfile", ".dockerignore", "LICENSE", "README.md", "pyproject.toml", "hatch_build.py"),
    *("agent_shim", "requirements", "stemcell_overlay", "systemd", "tools"),
)
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@contextmanager
def index(wheels: Path, where: Path) -> Iterator[str]:
    """Serve a directory of wheels over HTTPS and yield the URL. The CA certificate is written to ``where/ca.crt``."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=where, check=True, capture_output=True)

    openssl(
        "req", "-x509", *KEY, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=Example Company CA", "-days", "2"
    )
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    openssl("req", *KEY, "-keyout", "server.key", "-out", "server.csr", *name)
    sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-copy_extensions", "copy", "-days", "1")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.crt", *sign)

    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(wheels))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(where / "server.crt", where / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://localhost:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_image_can_be_built_with_a_private_ca(podman: Podman, base: str, image: str, tmp_path: Path) -> None:
    """The test uses the commands in docs/kubernetes.md. Without the CA certificate, the build must fail."""
    version = podman("run", "--rm", "--network=none", image, "/opt/agent_shim/python/bin/python3", "-V").split()[1]
    wheels, tree = tmp_path / "wheels", tmp_path / "tree"
    for lock in ("build", "runtime"):
        wanted = ["--only-binary=:all:", f"--python-version={version}", "--require-hashes", "--no-deps"]
        words = ["pip", "download", "--quiet", *wanted, f"--dest={wheels}", f"-r{ROOT}/requirements/{lock}.lock"]
        subprocess.run([ROOT / "dev", "run", *words], check=True)
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(ROOT / part, tree / part)
    # Invalidate the cached layer explicitly, because changing a secret does not.
    (tree / "requirements/layer").write_text(str(uuid.uuid4()))

    with index(wheels, tmp_path) as url:
        (tmp_path / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {url}\nretries = 0\n")
        secret = f"--secret=id=pip_conf,src={tmp_path}/pip.conf"
        arguments = ["build", "--network=host", f"--build-arg=BASE_IMAGE={base}", "--target=build", secret]
        refused = podman.run(*arguments, str(tree))
        made = podman(*arguments, f"--secret=id=ca_bundle,src={tmp_path}/ca.crt", str(tree)).split()[-1]
    try:
        said = podman("run", "--rm", "--network=none", made, "/opt/agent_shim/bin/agent-shim", "version")
        left = podman.run("run", "--rm", "--network=none", made, "cat", "/etc/pip.conf", "/run/secrets/ca.crt")
    finally:
        podman.run("rmi", "--force", made)

    assert refused.returncode != 0
    assert b"certificate verify failed" in (refused.stdout + refused.stderr).lower().replace(b"_", b" ")
    assert said.startswith("agent-shim ")
    assert left.stdout == b""
