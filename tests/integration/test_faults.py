"""Bus, agent and a job killed while a deploy runs: it can be finished, and nothing is half done or done twice."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow
