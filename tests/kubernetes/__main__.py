"""``./dev test-kubernetes``: run this directory's tests in new namespaces, where they start a Kubernetes node."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.kubernetes.run import run_as_node


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments and return its exit code. If a prerequisite is missing, print a message and
    return 1.
    """
    options = [
        "-qm",
        "kubernetes",
        "-o",
        "cache_dir=.pytest_cache/kubernetes",
        "--timeout=1800",
        "-o",
        "faulthandler_timeout=0",
    ]
    has_path = any(Path(argument.split("::")[0]).exists() for argument in arguments)
    places = [] if has_path else ["tests/kubernetes"]
    return run_as_node([sys.executable, "-m", "pytest", *options, *places, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
