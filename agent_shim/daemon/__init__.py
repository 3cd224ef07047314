"""The daemon: boot, the wiring of services and edges, recovery of jobs, shutdown, the worker process."""

from agent_shim.core import lean_imports

# 0.7 MB: a traceback reads lines of sources by tokenize and indents those of groups by textwrap, subprocess asks locale
# for the encoding of texts, and ipaddress is for addresses in the brackets of a URL.
_LATE = {"inspect": lean_imports.FEW_OF_INSPECT, "ipaddress": {}, "locale": {}, "textwrap": {}, "tokenize": {}}
with lean_imports.without(late=_LATE):
    import asyncio  # noqa: F401
    import urllib.parse  # noqa: F401
# 0.9 MB: msgspec takes the functions of typing_extensions from typing, too; nothing here describes types or has decimal
# numbers; uuid looks for Windows.
_UNUSED = ("msgspec.inspect", "msgspec._json_schema", "decimal")
with lean_imports.without("typing_extensions", empty=_UNUSED, late={"platform": {"system": lambda: "Linux"}}):
    import msgspec  # noqa: F401
