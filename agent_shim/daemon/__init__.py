"""The daemon: boot, the wiring of services and edges, recovery of jobs, shutdown, the worker process."""

from agent_shim.core import lean_imports

_UNUSED = ("msgspec.inspect", "msgspec._json_schema")

# 0.4 MB: msgspec takes the functions of typing_extensions from typing, too, and nothing here describes types.
with lean_imports.without("typing_extensions", empty=_UNUSED):
    import msgspec  # noqa: F401
with lean_imports.without(empty=["ast"]):  # 0.3 MB: for signatures of functions in C
    import inspect  # noqa: F401
with lean_imports.without("bz2", "lzma"):  # 0.13 MB: nothing here has archives made by shutil
    import shutil  # noqa: F401
