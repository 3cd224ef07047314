"""``python -m tools.trial.own DIRECTORY``: run a Kubernetes node until DIRECTORY contains a file named ``stop``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.support.kubernetes import node as nodes
from tests.support.kubernetes.cpi_site import CLASS, STORAGE
from tests.support.kubernetes.run import run_as_node

DEFAULT = {"storageclass.kubernetes.io/is-default-class": "true"}


def main(where: Path) -> int:
    """Start the node in new namespaces, write ``node.json``, and wait for the ``stop`` file. Return the exit code."""
    if nodes.NODE not in os.environ:
        return run_as_node([sys.executable, "-m", "tools.trial.own", str(where)])
    node = nodes.FirstNode(nodes.here())
    node.start()
    storage = STORAGE | {"metadata": {"name": CLASS, "annotations": DEFAULT}}
    done = node.kubectl("apply", "--filename=-", stdin=json.dumps(storage))
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return 1
    told = {"address": nodes.ADDRESS, "kubeconfig": str(node.where / "kubeconfig"), "digest": node.digest()}
    unfinished = where / "node.json.new"
    unfinished.write_text(json.dumps(told))
    unfinished.rename(where / "node.json")
    while not (where / "stop").exists():
        time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
