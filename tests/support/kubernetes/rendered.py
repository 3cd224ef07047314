"""A small compiled release, and the image and manifests that ``agent-shim render --kubernetes`` generates from it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from tests.support.pods import IMAGE, Podman

RENDERER: Final = "localhost/agent-shim/peers"
DIRECTORY: Final = "rendered"
"""The manifests' directory, which is below the node's directory."""
GROUP: Final = "web"
PORT: Final = 8080

MANIFEST: Final = f"""
name: shop
instance_groups:
- name: {GROUP}
  instances: 2
  azs: [z1, z2]
  persistent_disk: 64
  jobs: [{{name: peers, release: peers}}]
"""
SPEC: Final = f"""
name: peers
templates: {{peers.erb: config/peers, id.erb: config/id, bpm.yml.erb: config/bpm.yml}}
packages: [peers]
properties: {{peers.port: {{default: {PORT}}}}}
provides: [{{name: peers, type: peers, properties: [peers.port]}}]
consumes: [{{name: peers, type: peers}}]
"""
MONIT: Final = """check process peers
  with pidfile /var/vcap/sys/run/bpm/peers/peers.pid
  start program "/var/vcap/jobs/bpm/bin/bpm start peers"
  stop program "/var/vcap/jobs/bpm/bin/bpm stop peers"
  group vcap
"""
TEMPLATES: Final = {
    "peers.erb": '<% link("peers").instances.each do |one| %><%= one.address %>:<%= link("peers").p("peers.port") %>\n'
    "<% end %>",
    "id.erb": "<%= spec.id %> in <%= spec.az %>, bootstrap <%= spec.bootstrap %>\n",
    "bpm.yml.erb": "processes:\n"
    "- {name: peers, executable: /var/vcap/packages/peers/bin/serve, persistent_disk: true}\n",
}
SERVE: Final = f"#!/bin/sh\nexec python3 -m http.server --directory /var/vcap/jobs/peers/config {PORT}\n"


def make(podman: Podman, renderer: str, where: Path) -> str:
    """Create and render a small release as docs/without-director.md describes.

    Write the manifests to ``where/rendered``, build the init container's image, and return the image's name.
    """
    release = where / "peers"
    templates = release / "jobs/peers/templates"
    templates.mkdir(parents=True)
    (release / "jobs/peers/spec").write_text(SPEC)
    (release / "jobs/peers/monit").write_text(MONIT)
    for name, text in TEMPLATES.items():
        (templates / name).write_text(text)
    serve = where / "bin/serve"
    serve.parent.mkdir()
    serve.write_text(SERVE)
    serve.chmod(0o755)
    (release / "compiled_packages").mkdir()
    with tarfile.open(release / "compiled_packages/peers.tgz", "w:gz") as archive:
        archive.add(serve.parent, "bin")
    (where / "manifest.yml").write_text(MANIFEST)
    options = ["--kubernetes", "--out", DIRECTORY, "--image", IMAGE, "--renderer", RENDERER]
    command = [sys.executable, "-m", "agent_shim", "render", "manifest.yml", "peers", *options]
    subprocess.run(command, cwd=where, check=True)
    argument = f"--build-arg=RENDERER={renderer}"
    podman("build", "--quiet", argument, "--tag", RENDERER, f"--file={where / DIRECTORY / 'Dockerfile'}", str(where))
    return RENDERER
