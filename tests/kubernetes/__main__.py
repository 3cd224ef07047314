"""``./dev test-kubernetes``: run these tests in new namespaces, in which they start a Kubernetes node."""

from __future__ import annotations

import sys

from tests.support.kubernetes.run import run_as_node


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments. Return its exit code, or print a message and return 1 if a prerequisite is
    missing.
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
    return run_as_node([sys.executable, "-m", "pytest", *options, "tests/kubernetes", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
