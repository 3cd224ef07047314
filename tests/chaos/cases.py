"""Registers all scorecard cases by importing the modules that contain them."""

from __future__ import annotations

from tests.chaos import (
    test_crash,
    test_disks,
    test_kernel,
    test_messages,
    test_network,
    test_resources,
    test_supervision,
)
from tests.chaos.case import CASES

__all__ = ["CASES", "MODULES"]

MODULES = (test_crash, test_disks, test_kernel, test_messages, test_network, test_resources, test_supervision)
