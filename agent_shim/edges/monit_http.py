"""Implements monit 5.2.5's HTTP interface for releases (http/cervlet.c, http/xml.c).

The Go agent requests ``GET /_status2?format=xml``, and pxc's galera-agent ``GET /_status?format=xml``. Both send ``POST
/SERVICE`` with ``action=start`` or another action, and galera-agent searches the returned page for ``start pending``.
Callers need the password in ``/var/vcap/monit/monit.user``, which only root can read.

This module also listens on the port on which the Go agent accepts monit's emails, because CPIs probe that port. It
rejects all mail.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import hashlib
import hmac
import operator
import os
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from agent_shim.core import safetext
from agent_shim.edges import http_server, monit_text
from agent_shim.edges.http_server import HttpRequest, HttpResponse
from agent_shim.host import clock, files, host_stats, proc
from agent_shim.supervisor.event_kinds import BITS, HINTS

ACTIONS: Final = ("start", "stop", "restart", "monitor", "unmonitor")
XML: Final = "text/xml"
HTML: Final = "text/html"

TYPES: Final = {"filesystem": 0, "directory": 1, "file": 2, "process": 3, "host": 4, "system": 5, "fifo": 6}
MODES: Final = {"active": 0, "passive": 1, "manual": 2}
MONITOR: Final = {"stopped": 0, "unmonitored": 0, "stopping": 0, "starting": 2, "settling": 2}
"""The value of ``monitor`` in the document, by phase. It is 1 for all other phases."""
PENDING: Final = {"starting": 6, "restarting": 2, "stopping": 3}
"""The value of ``pendingaction``, by phase. It is 0 for all other phases."""
MISSING: Final = 0x200
"""Status bit of a process that does not exist."""
FAILED: Final = 0x1000
"""Status bit of a program that could not be started."""

Ask: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""A function that forwards a request to ``supervisor.monit_api`` and adds the agent's ``uptime_secs`` to the reply."""

Users: TypeAlias = Callable[[], Mapping[bytes, bool] | None]
"""Returns each user's ``user:password`` and whether the user may change services, or None if access is unrestricted.
Raises ``OSError``.
"""


class About(msgspec.Struct, frozen=True):
    """Facts about the daemon for the status document. The defaults are those of a stemcell."""

    control_file: str = "/var/vcap/bosh/etc/monitrc"
    poll: int = 10
    address: str = "127.0.0.1"
    port: int = 2822
    id: str = ""
    """The daemon's id. The default "" means that a digest of the host name is used."""
    incarnation: int = 0
    """When the control file was read, in seconds since 1970. The default 0 means the time at which this process
    started.
    """


def user_in(path: Path) -> Users:
    """Return a function that reads the user from the file at ``path``. The agent wrote the file, with a single user."""
    return lambda: {files.read(path, is_own=True).strip(): True}


class Api:
    """Answers status and action requests from ``users``."""

    def __init__(self, ask: Ask, users: Users, about: Callable[[], About] = About) -> None:
        self._ask = ask
        self._users = users
        self._about = about

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer a status or action request, or reject it if the caller is not one of the users."""
        may_act = await asyncio.to_thread(self._rights, request.headers.get("authorization", ""))
        if may_act is None:
            refused = _refused(401, "You are not authorized to access monit")
            return msgspec.structs.replace(refused, headers={"WWW-Authenticate": 'Basic realm="monit"'})
        path, _, query = request.target.partition("?")
        name = urllib.parse.unquote(path.removeprefix("/"))
        if request.method == "POST":
            if not may_act:
                return _refused(403, "You do not have sufficient privileges to access this page")
            return await self._run_action(name, request.body)
        shown = await self._ask({"action": "show"})
        if name in ("_status", "_status2"):
            return self._status(name, urllib.parse.parse_qs(query), shown)
        if name:
            return _page(shown, name, "")
        return _table((service["name"], monit_text.words(service)) for service in shown.get("services", ()))

    @functools.cached_property
    def _here(self) -> MachineFacts:
        return MachineFacts()  # created late, because importing psutil must not delay the first answer to a ping

    def _rights(self, given: str) -> bool | None:
        """Return True for a user who may change services, False for one who may only read, and None for anybody
        else.
        """
        kind, _, encoded = given.partition(" ")
        try:
            users = self._users()
            if users is None:
                return True
            caller = base64.b64decode(encoded) if kind.lower() == "basic" else b""
            # The check for a colon keeps an empty file from admitting callers without a password.
            known = (may for user, may in users.items() if hmac.compare_digest(caller, user) and b":" in user)
            return next(known, None)
        except (OSError, binascii.Error, ValueError):
            return None

    def _status(self, name: str, query: Mapping[str, list[str]], shown: Mapping[str, Any]) -> HttpResponse:
        """Return the status as XML if the query asks for XML, otherwise as text."""
        if query.get("format") != ["xml"]:
            layout = monit_text.summary if query.get("level") == ["summary"] else monit_text.status
            return HttpResponse(200, layout(shown, monit_text.HostFacts.now()).encode(), "text/plain")
        text = document(shown, self._here, version=2 if name == "_status2" else 1, daemon=self._about())
        return HttpResponse(200, text.encode("latin-1", "xmlcharrefreplace"), XML)

    async def _run_action(self, name: str, body: bytes) -> HttpResponse:
        """Run an action on the service ``name``, and return the service's page. ``body`` is the form that contains the
        action.
        """
        action = urllib.parse.parse_qs(body.decode("latin-1")).get("action", [""])[0]
        shown = await self._ask({"action": "show"})
        is_known = _named(shown, name) is not None
        if not is_known and name.lower() != f"system_{os.uname().nodename}".lower():
            return _refused(404, "There is no service by that name")
        if action not in ACTIONS:
            return _refused(400, "Invalid action")
        if not is_known:  # `monit … all` also sends the action to the system service, which is not in the list
            return _table([("Name", name), ("Status", f"running - {action} pending")])
        done = await self._ask({"action": action, "names": [name]})
        if "exception" in done:
            return _refused(503, done["exception"]["message"])
        return _page(await self._ask({"action": "show"}), name, f"{action} pending")


def _named(shown: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the service called ``name``, ignoring case as monit does, or None."""
    services = shown.get("services", ())
    return next((service for service in services if service["name"].lower() == name.lower()), None)


def _refused(status: int, why: str) -> HttpResponse:
    """Return an error page. It must contain ``</h2>`` and ``<p>``, because the ``monit`` 5.2.5 command shows the text
    between these tags, and crashes if ``</h2>`` is missing (control.c).
    """
    return HttpResponse(status, f"<html><body><h2>{status}</h2>{_escaped(why)}<p></body></html>\n".encode(), HTML)


def _page(shown: Mapping[str, Any], name: str, pending: str) -> HttpResponse:
    """Render a service's page. ``pending`` is a status such as ``start pending``, or "". It is shown even if the action
    is already done, because scripts search the page for it.
    """
    service = _named(shown, name)
    if service is None:
        return _refused(404, "There is no service by that name")
    words = monit_text.words(service)
    if pending and pending not in words:
        words = f"{words.partition(' - ')[0]} - {pending}"
    return _table([("Name", name), ("Status", words)])


def _table(rows: Iterable[tuple[str, str]]) -> HttpResponse:
    text = "".join(f"<tr><td>{_escaped(name)}</td><td>{_escaped(value)}</td></tr>" for name, value in rows)
    return HttpResponse(200, f"<html><body><table>{text}</table></body></html>\n".encode(), HTML)


# --- the document -----------------------------------------------------------------------------------------------------


class MachineFacts:
    """Facts about the machine that do not change while the agent runs."""

    def __init__(self) -> None:
        about, memory = os.uname(), host_stats.memory()
        own = proc.stat(os.getpid())
        self.name = about.nodename
        self.id = hashlib.md5(about.nodename.encode(), usedforsecurity=False).hexdigest()
        self.begun_at = int(clock.wall_time_of(own.start_ticks)) if own else 0
        self.platform = {
            "name": about.sysname,
            "release": about.release,
            "version": about.version,
            "machine": about.machine,
            "cpu": os.cpu_count() or 1,
            "memory": memory.total // 1024,
            "swap": memory.swap_total // 1024,
        }


def document(shown: Mapping[str, Any], here: MachineFacts, *, version: int, daemon: About = About()) -> str:  # noqa: B008 - the struct is frozen
    """Render the status as one line of XML. Some values that are attributes in version 2 of the format are elements in
    version 1.
    """
    services = shown.get("services", ())
    incarnation = daemon.incarnation or here.begun_at
    about = {"id": daemon.id or here.id, "incarnation": incarnation, "version": monit_text.VERSION}
    server = {
        "uptime": shown.get("uptime_secs", 0),
        "poll": daemon.poll,
        "startdelay": 0,
        "localhostname": here.name,
        "controlfile": daemon.control_file,
        "httpd": {"address": daemon.address, "port": daemon.port, "ssl": 0},
    }
    default = TYPES["process"]
    bodies = [(service["name"], TYPES.get(service["kind"], default), _service(service)) for service in services]
    if not any(service["kind"] == "system" for service in services):
        system = _state(status=0, hint=0, monitor=1, mode=0, pending=0) | _load()
        bodies.append((f"system_{here.name}", TYPES["system"], system))
    head = '<?xml version="1.0" encoding="ISO-8859-1"?>'
    platform = _element("platform", here.platform)
    if version == 1:
        elements = "".join(
            f'<service type="{kind}">{_members({"name": name} | body)}</service>' for name, kind, body in bodies
        )
        return f"{head}<monit>{_element('server', about | server)}{platform}{elements}</monit>"
    elements = "".join(
        f'<service name="{_escaped(name)}">{_members({"type": kind} | body)}</service>' for name, kind, body in bodies
    )
    attributes = " ".join(f'{name}="{_escaped(str(value))}"' for name, value in about.items())
    groups = "".join(
        f'<servicegroup name="{_escaped(group)}">{"".join(_element("service", name) for name in names)}</servicegroup>'
        for group, names in _groups(services).items()
    )
    return (
        f"{head}<monit {attributes}>{_element('server', server)}{platform}<services>{elements}</services>"
        f"<servicegroups>{groups}</servicegroups></monit>"
    )


def _service(service: Mapping[str, Any]) -> dict[str, Any]:
    """Return a service's XML fields in monit's order. Figures are included only where monit includes them."""
    phase, status = service["phase"], _bits(service)
    hint = sum(HINTS.get(fault, 0) for fault in service["faults"]) if phase == "running" else 0
    monitor = MONITOR["starting"] if service["state"] == "starting" else MONITOR.get(phase, 1)
    mode, pending = MODES.get(service["mode"], 0), PENDING.get(phase, 0)
    members = _state(status=status, hint=hint, monitor=monitor, mode=mode, pending=pending)
    if status:
        members["status_message"] = _Data(service["reason"] or "process is not running")
    if service["kind"] == "process" and monitor == 1 and not status & MISSING and service["pid"]:
        members |= {
            "pid": service["pid"],
            "ppid": service["parent"],
            "uptime": service["uptime_secs"],
            "children": service["children"],
            "memory": {
                "percent": f"{service['own_mem_percent']:.1f}",
                "percenttotal": f"{service['mem_percent']:.1f}",
                "kilobyte": service["own_mem_kb"],
                "kilobytetotal": service["mem_kb"],
            },
            "cpu": {"percent": f"{service['own_cpu']:.1f}", "percenttotal": f"{service['cpu_total']:.1f}"},
        }
    if monitor == 1 and phase == "running":
        members |= _load() if service["kind"] == "system" else {}
        members["responses"] = _Siblings(_response(response) for response in service["responses"])
    return members


def _response(response: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the XML element for the result of a connection test or an echo request."""
    seconds = {"responsetime": f"{response['seconds']:.3f}"}
    match response["kind"]:
        case "ICMP":
            return "icmp", {"type": "Echo Request"} | seconds
        case "UNIX":
            return "unix", {"path": response["path"], "protocol": response["protocol"]} | seconds
    target = {"hostname": response["host"], "portnumber": response["port"], "request": response["request"]}
    return "port", target | {"protocol": response["protocol"], "type": response["kind"]} | seconds


def _bits(service: Mapping[str, Any]) -> int:
    """Return a service's ``status`` bit mask. 0 means no fault."""
    match service["phase"]:
        case "running":
            return functools.reduce(operator.or_, (BITS[fault] for fault in service["faults"]), 0)
        case "down" | "restarting":
            return MISSING | (FAILED if service["reason"].startswith("cannot start") else 0)
        case "broken":
            return FAILED
    return 0


def _load() -> dict[str, Any]:
    """Return the XML fields that only the system has."""
    load = [f"{average:.2f}" for average in os.getloadavg()]
    return {"system": {"load": dict(zip(("avg01", "avg05", "avg15"), load, strict=True))}}


def _state(*, status: int, hint: int, monitor: int, mode: int, pending: int) -> dict[str, Any]:
    """Return the XML fields that every service has."""
    now = clock.wall_time()
    collected = {"collected_sec": int(now), "collected_usec": int(now % 1 * 1e6), "status": status, "status_hint": hint}
    return collected | {"monitor": monitor, "monitormode": mode, "pendingaction": pending}


def _groups(services: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the service names in each group, in the reverse order of the monit files, as monit does."""
    found: dict[str, list[str]] = {}
    for service in services:
        for group in service["groups"]:
            found.setdefault(group, []).insert(0, service["name"])
    return found


_ESCAPES: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})


def _escaped(text: str) -> str:
    """Escape text for XML and HTML, including attributes. The ``html`` module is not used, because it loads a table of
    thousands of entities.
    """
    return safetext.line(text).translate(_ESCAPES)


class _Data(str):
    """Text for a CDATA section."""

    __slots__ = ()


class _Siblings(tuple[tuple[str, Any], ...]):
    """Elements, each with a name, that are not enclosed in a common parent element."""

    __slots__ = ()


def _members(members: Mapping[str, Any]) -> str:
    """Return the entries of ``members`` as XML elements."""
    return "".join(_element(name, value) for name, value in members.items())


def _element(name: str, value: Any) -> str:
    """Return an XML element. A mapping becomes child elements, and ``_Siblings`` become elements without a parent."""
    if isinstance(value, _Siblings):
        return "".join(_element(*part) for part in value)
    if isinstance(value, Mapping):
        content = _members(value)
    elif isinstance(value, _Data):
        content = f"<![CDATA[{safetext.line(value).replace(']]>', ']] >')}]]>"  # "]]>" would end the section
    else:
        content = _escaped(str(value))
    return f"<{name}>{content}</{name}>"


# --- the ports --------------------------------------------------------------------------------------------------------


def listening(
    address: str, ask: Ask, users: Users, about: Callable[[], About] = About
) -> AbstractAsyncContextManager[tuple[str, int] | None]:
    """Serve on ``address`` for the duration of the block. ``about`` returns what the status document says about the
    daemon. Yields the bound address, or None if ``address`` is ``off`` or cannot be bound.
    """
    return http_server.listening(address, Api(ask, users, about).answer, "clients of monit", ("GET", "HEAD", "POST"))


class _NoMail(asyncio.Protocol):
    """Rejects all mail and closes the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"554 no mail accepted: alerts go to the Health Monitor only\r\n")
        transport.close()


def refusing_mail(address: str) -> AbstractAsyncContextManager[tuple[str, int] | None]:
    """Accept connections on ``address`` for the duration of the block, so that port probes succeed, but reject all
    mail.
    """
    return http_server.serving(address, _NoMail, "probes of the mail port")
