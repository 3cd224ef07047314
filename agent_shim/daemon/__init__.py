"""The daemon: boot, the wiring of services and edges, recovery of jobs, shutdown, the worker process."""

from agent_shim.core import lean_imports

with lean_imports.without("typing_extensions"):  # 0.3 MB; msgspec takes the same functions from typing
    import msgspec  # noqa: F401
