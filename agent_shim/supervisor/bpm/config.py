"""Parser for bpm.yml, which defines a job's processes and their permissions. Does no I/O.

Schema and rules follow bpm-release (``src/bpm/config/job_config.go``, ``docs/config.md``). Scalars are interpreted as
by Go's yaml.v3, which is bpm's parser. Text fields keep a scalar exactly as it is written, so ``- 1.10``, ``- 0x1f``,
``- yes`` and ``- true`` can be used as arguments. Unknown keys are ignored, and duplicate keys are errors. Unlike bpm,
this parser accepts quoted flags and numbers, because some templates quote everything.
"""

from __future__ import annotations

import base64
import math
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final, Literal, cast

import msgspec
import yaml

from agent_shim.core import config_check
from agent_shim.core.errors import ConfigError

ROOT: Final = PurePosixPath("/var/vcap")
MAX_BYTES: Final = 256 * 1024
"""Maximum size of a bpm.yml."""
MAX_MISTAKES: Final = 20
"""Maximum number of problems that one error lists."""


class Volume(msgspec.Struct, frozen=True):
    """An extra directory or file visible to the process.

    A missing volume is created as a directory owned by vcap. There are two exceptions: an unrestricted volume is left
    out if it is missing, and a process is not started if one of its ``mount_only`` volumes is missing. If ``shared`` is
    set, mounts below the volume propagate in both directions.
    """

    path: str
    writable: bool = False
    allow_executions: bool = False
    mount_only: bool = False
    shared: bool = False


class Limits(msgspec.Struct, frozen=True):
    """Resource limits. ``memory`` and ``core_file_size`` are in bytes, ``processes`` includes threads, and None means
    no limit.
    """

    memory: int | None = None
    open_files: int | None = None
    processes: int | None = None
    core_file_size: int | None = None


class Unsafe(msgspec.Struct, frozen=True):
    """Exceptions to the sandbox: running as root with all capabilities, mounting volumes from anywhere (globs are
    allowed), and using the host's pid namespace.
    """

    privileged: bool = False
    unrestricted_volumes: tuple[Volume, ...] = ()
    host_pid_namespace: bool = False


class ProcessConfig(msgspec.Struct, frozen=True):
    """A process definition in bpm.yml. ``env`` overrides the default environment variables. If ``workdir`` is empty,
    the process runs in the job's directory.

    ``pre_start`` is a program that runs before the process, as root and outside the sandbox; "" means none.
    ``capabilities`` are in capital letters and without the ``CAP_`` prefix. ``ephemeral_disk`` and
    ``persistent_disk`` grant access to ``data/JOB`` and ``store/JOB``. ``shutdown_signal`` is the first signal that
    is sent to stop the process.
    """

    name: str
    executable: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    workdir: str = ""
    pre_start: str = ""
    capabilities: tuple[str, ...] = ()
    limits: Limits = Limits()
    ephemeral_disk: bool = False
    persistent_disk: bool = False
    additional_volumes: tuple[Volume, ...] = ()
    unsafe: Unsafe = Unsafe()
    shutdown_signal: Literal["TERM", "INT"] = "TERM"


class BpmFile(msgspec.Struct, frozen=True):
    """The processes that a bpm.yml defines. An empty file defines none."""

    processes: tuple[ProcessConfig, ...] = ()

    def process(self, name: str) -> ProcessConfig | None:
        """Return the first process called ``name``, or None. ``name`` is the argument of bpm's ``-p`` option, or by
        default the job's name.
        """
        return next((process for process in self.processes if process.name == name), None)


def parse(
    text: str, *, origin: str, job: str = "", root: PurePosixPath = ROOT, unknown: list[str] | None = None
) -> BpmFile:
    """Parse a bpm.yml. Raises ``ConfigError`` with the message ``cannot read ORIGIN: line L: KEY PATH: found X,
    expected Y; …``.

    Additional volumes must be below ``root`` and must not be the data or store directory of ``job`` itself. Unknown
    keys are ignored, and a message for each of them is appended to ``unknown``.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise ConfigError(f"cannot read {origin}: it has more than {MAX_BYTES >> 10} KiB")
    node = _composed(text, origin)
    if node is None:
        return BpmFile()
    notes = _Notes()
    top = _Map(notes, "", node)
    disks = frozenset(str(root / disk / job) for disk in ("data", "store")) if job else frozenset[str]()
    file = BpmFile(tuple(_process(entry, str(root), disks) for entry in top.maps("processes", allows_null=False)))
    if unknown is not None:
        unknown += notes.unknown_keys()
    if notes.mistakes:
        more = len(notes.mistakes) - MAX_MISTAKES
        shown = [*notes.mistakes[:MAX_MISTAKES], *([f"and {more} more"] if more > 0 else [])]
        raise ConfigError(f"cannot read {origin}: {'; '.join(shown)}")
    return file


# --- the schema -------------------------------------------------------------------------------------------------------


def _process(entry: _Map, root: str, disks: frozenset[str]) -> ProcessConfig:
    """Parse one process definition. ``root`` is the base directory, and ``disks`` are the job's data and store
    directories, which cannot be additional volumes.
    """
    signal = entry.text("shutdown_signal") or "TERM"
    if signal not in ("TERM", "INT"):
        entry.wrong("shutdown_signal", "TERM or INT")
    volumes = [_additional_volume(volume, root, disks) for volume in entry.maps("additional_volumes")]
    return ProcessConfig(
        name=entry.required("name"),
        executable=entry.required("executable"),
        args=entry.texts("args"),
        env=entry.text_map("env"),
        workdir=entry.text("workdir"),
        pre_start=entry.map("hooks").text("pre_start"),
        capabilities=tuple(each.upper().removeprefix("CAP_") for each in entry.texts("capabilities")),
        limits=_limits(entry.map("limits")),
        ephemeral_disk=entry.flag("ephemeral_disk"),
        persistent_disk=entry.flag("persistent_disk"),
        additional_volumes=tuple(volumes),
        unsafe=_unsafe(entry.map("unsafe")),
        shutdown_signal=cast("Literal['TERM', 'INT']", signal),
    )


def _limits(entry: _Map) -> Limits:
    processes = entry.number("processes", -_SIGNED - 1, _SIGNED)
    return Limits(
        memory=_bytes(entry, "memory"),
        open_files=entry.number("open_files", 0, _UNSIGNED),
        processes=None if processes is None or processes < 1 else processes,  # as in runc, this means no limit
        core_file_size=entry.number("core_file_size", 0, _UNSIGNED),
    )


def _bytes(entry: _Map, key: str) -> int | None:
    """Parse a size such as ``256M`` and return it in bytes. Units are powers of 1024, as in Cloud Foundry's bytefmt."""
    text = entry.text(key)
    if not entry.has(key):
        return None
    match = _QUANTITY.fullmatch(text.strip().upper())
    # Treat text that is not a size as infinity, so that it is rejected like a size that is too large.
    quantity = float(match[1]) * 1024 ** "BKMGTPE".index(match[2][0]) if match else math.inf
    if quantity > _UNSIGNED:
        entry.wrong(key, "a number and a unit, like 256M or 1G")
        return None
    return int(quantity)


def _unsafe(entry: _Map) -> Unsafe:
    return Unsafe(
        privileged=entry.flag("privileged"),
        unrestricted_volumes=tuple(_volume(volume) for volume in entry.maps("unrestricted_volumes")),
        host_pid_namespace=entry.flag("host_pid_namespace"),
    )


def _volume(entry: _Map) -> Volume:
    flags = ("writable", "allow_executions", "mount_only", "shared")
    return Volume(entry.text("path"), **{flag: entry.flag(flag) for flag in flags})


def _additional_volume(entry: _Map, root: str, disks: frozenset[str]) -> Volume:
    """Parse an additional volume. Its path must satisfy the same rules as in ``check_volume``, but errors are recorded
    instead of raised.
    """
    volume = _volume(entry)
    if volume.path != _clean(volume.path):
        entry.wrong("path", f"the shortest form, '{_clean(volume.path)}'")
    elif volume.path in disks:
        entry.wrong("path", "another directory (ephemeral_disk and persistent_disk give these)")
    elif not volume.path.startswith(f"{root}/"):
        entry.wrong("path", f"a path inside {root} (others are unrestricted_volumes)")
    return volume


def check_volume(path: str, *, job: str, root: PurePosixPath = ROOT) -> None:
    """Raise ``ConfigError`` with bpm's error message if the path of an additional volume is invalid."""
    if path != (clean := _clean(path)):
        raise ConfigError(f"volume path must be canonical, expected {clean} but got {path}")
    if path in (str(root / disk / job) for disk in ("data", "store")):
        raise ConfigError(f"invalid volume path: {path} cannot conflict with default job data or store directories")
    if not path.startswith(f"{root}/"):
        raise ConfigError(f"invalid volume path: {path} must be within {root}")


def _clean(path: str) -> str:
    """Return the shortest equivalent path. Two leading slashes become one, as in Go, whereas ``normpath`` keeps
    both.
    """
    return re.sub("^//", "/", posixpath.normpath(path))


# --- YAML as Go's yaml.v3 decodes it ----------------------------------------------------------------------------------

MAX_DEPTH: Final = 100
"""Maximum nesting depth of a file. The schema has six levels."""

_SIGNED: Final = 2**63 - 1
"""Maximum of Go's int64."""
_UNSIGNED: Final = 2**64 - 1
"""Maximum of Go's uint64."""
_MAX_DIGITS: Final = 80
"""Maximum length of an integer, including its sign and base prefix. A 64-bit integer in base 2 fits."""

_MAX_SHOWN_CHARS: Final = 40
"""Maximum length of a wrong value that is quoted in an error."""

_TAG: Final = "tag:yaml.org,2002:"
_NO_NAMES: Final = (f"{_TAG}merge", f"{_TAG}null")
"""YAML tags of ``<<`` and null. A key with one of these tags is not the name of an entry."""

_FLAGS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("true", "True", "TRUE", "y", "Y", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "n", "N", "no", "No", "NO", "off", "Off", "OFF"), False),
}
_INTEGER: Final = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_QUANTITY: Final = re.compile(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)(B|[KMGTPE](?:I?B)?)")

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader that uses libyaml, if PyYAML was built with it."""


class _Notes:
    """Collects the errors in a file. Also collects its mappings, so that unknown keys can be reported at the end."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self.maps: list[_Map] = []

    def unknown_keys(self) -> Iterator[str]:
        """Yield a message for each unknown key, with the most similar known key as a suggestion."""
        for mapping in self.maps:
            for key in mapping.entries.keys() - mapping.known:
                position = f"line {_line_of(mapping.entries[key])}: unknown key {mapping.at(key)}"
                yield position + config_check.did_you_mean(key, mapping.known)


class _Map:
    """A mapping at ``path`` in the file. A key that is absent or null has no value.

    The methods that read a value record an error in ``notes`` if the value is invalid, and then return a placeholder.
    ``parse`` raises all errors together at the end.
    """

    def __init__(self, notes: _Notes, path: str, node: yaml.Node) -> None:
        self.notes = notes
        self.path = path
        self.node = node
        self.known: set[str] = set()
        """The keys that the schema defines for this mapping."""
        notes.maps.append(self)  # ``unknown_keys`` examines all mappings at the end
        self.entries = {} if _is_null(node) else self._merged(node, {})

    def wrong(self, key: str, expected: str) -> None:
        """Record that the value of ``key`` is wrong, and what was expected instead."""
        self._wrong(self.at(key), self.entries.get(key), expected)

    def has(self, key: str) -> bool:
        """Return True if the key has a value. Also record that the schema defines the key."""
        self.known.add(key)
        return key in self.entries and not _is_null(self.entries[key])

    def text(self, key: str) -> str:
        """Return the string at ``key``, or "" if it is absent."""
        return self._text(self.at(key), self.entries[key]) if self.has(key) else ""

    def required(self, key: str) -> str:
        """Return the string at ``key``. It is an error if the string is empty or absent."""
        text = self.text(key)
        if not text and isinstance(self.node, yaml.MappingNode):  # any other node has already been reported
            self.wrong(key, "a text")
        return text

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the strings in the list at ``key``, without null items."""
        return tuple(self._text(path, node) for path, node in self._items(key) if not _is_null(node))

    def text_map(self, key: str) -> dict[str, str]:
        """Return the mapping at ``key``, with strings as values. A null value becomes ""."""
        found = self.map(key)
        return {name: found.text(name) for name in found.entries}

    def map(self, key: str) -> _Map:
        """Return the mapping at ``key``, or an empty mapping if the key is absent."""
        node = self.entries[key] if self.has(key) else _NOTHING
        return _Map(self.notes, self.at(key), node)

    def maps(self, key: str, *, allows_null: bool = True) -> list[_Map]:
        """Return the mappings in the list at ``key``. Null items are skipped if ``allows_null`` is set;
        otherwise, they are errors.
        """
        found = []
        for path, node in self._items(key):
            if not _is_null(node):
                found.append(_Map(self.notes, path, node))
            elif not allows_null:
                self._wrong(path, node, "a mapping")
        return found

    def flag(self, key: str) -> bool:
        """Return the flag at ``key``, or False if it is absent. A quoted number is true unless it is 0."""
        if not self.has(key):
            return False
        node = self.entries[key]
        if isinstance(node, yaml.ScalarNode) and node.value in _FLAGS:
            return _FLAGS[node.value]
        # The style of an unquoted scalar is empty.
        number = _number(node) if isinstance(node, yaml.ScalarNode) and node.style else None
        if number is None:
            self.wrong(key, "true or false")
        return bool(number)

    def number(self, key: str, least: int, most: int) -> int | None:
        """Return the integer at ``key``, or None if it is absent. A value that is not between ``least`` and ``most`` is
        an error.
        """
        if not self.has(key):
            return None
        number = _number(self.entries[key])
        if number is None or not least <= number <= most:
            # Do not suggest a negative number, although one is accepted for ``processes``.
            self.wrong(key, f"a whole number from {max(least, 0)} to {most}")
        return number

    def at(self, key: str) -> str:
        """Return the path of ``key`` in the file, such as ``processes[0].args``."""
        return f"{self.path}.{key}" if self.path else key

    def _wrong(self, path: str, node: yaml.Node | None, expected: str, found: str = "") -> None:
        """Record that a value is wrong. ``node`` is None if the value is absent. ``found`` overrides the usual
        description of the value.
        """
        position = f"line {_line_of(node or self.node)}: " + (f"{path}: " if path else "")
        self.notes.mistakes.append(f"{position}found {found or _found(node)}, expected {expected}")

    def _text(self, path: str, node: yaml.Node) -> str:
        """Return a scalar's text as written in the file, whatever its type."""
        if not isinstance(node, yaml.ScalarNode):
            self._wrong(path, node, "a text")
            return ""
        text = _decoded(node)
        if text is None:
            self._wrong(path, node, "base64", found="something else")
        elif "\0" in text:
            self._wrong(path, node, "a text", found="a NUL")
        return text or ""

    def _items(self, key: str) -> Iterator[tuple[str, yaml.Node]]:
        """Yield the path and the node of each item in the list at ``key``."""
        if not self.has(key):
            return
        node = self.entries[key]
        if not isinstance(node, yaml.SequenceNode):
            self.wrong(key, "a list")
            return
        for number, item in enumerate(node.value):
            yield f"{self.at(key)}[{number}]", item

    def _merged(self, node: yaml.Node, cache: dict[int, dict[str, yaml.Node]]) -> dict[str, yaml.Node]:
        """Return the entries of a mapping, including those merged with ``<<``. The mapping's own keys take precedence.
        If several merged mappings have the same key, the first one wins.

        ``cache`` contains the mappings read so far, so that each is read only once even if it is merged repeatedly.
        """
        if id(node) in cache:
            return cache[id(node)]
        # Each level of the recursion adds a mapping to ``cache``, so limiting its size limits the depth.
        if not isinstance(node, yaml.MappingNode) or len(cache) > MAX_DEPTH:
            self._wrong(self.path, node, "a mapping")
            return {}
        cache[id(node)] = found = dict[str, yaml.Node]()  # cached now, because a mapping may merge itself
        seen: set[str] = set()
        own: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._wrong(self.path, key, "a key")
                continue
            if key.value in seen:
                self._wrong(self.at(key.value), key, "each key once")
            seen.add(key.value)
            if key.tag == f"{_TAG}merge":
                for other in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
                    found.update(self._merged(other, cache))
            elif key.tag not in _NO_NAMES:
                own[key.value] = value
        found.update(own)
        return found


def _line_of(node: yaml.Node | yaml.Event) -> int:
    """Return the line number of a node or event, counted from 1. PyYAML always sets the mark, although its type allows
    None.
    """
    mark = node.start_mark
    assert mark is not None
    return mark.line + 1


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == f"{_TAG}null")


def _found(node: yaml.Node | None) -> str:
    """Describe a wrong value for an error message."""
    if isinstance(node, yaml.ScalarNode):
        text = node.value if len(node.value) <= _MAX_SHOWN_CHARS else f"{node.value[:_MAX_SHOWN_CHARS]}..."
        return "null" if _is_null(node) else f"'{text}'"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "nothing" if node is None else "a mapping"


def _decoded(node: yaml.ScalarNode) -> str | None:
    """Return the text of a scalar, decoding base64 if it is tagged ``!!binary``. Return None for invalid base64."""
    if node.tag != f"{_TAG}binary":
        return cast("str", node.value)
    try:
        return base64.b64decode("".join(node.value.split()), validate=True).decode("utf-8", "surrogateescape")
    except ValueError:
        return None


def _number(node: yaml.Node) -> int | None:
    """Parse a number, which may be in base 2, 8 (``0o17`` or ``017``) or 16 and contain underscores. A fraction is
    truncated.
    """
    if not isinstance(node, yaml.ScalarNode):
        return None
    digits = node.value[:1] + node.value[1:].replace("_", "")  # a number cannot begin with an underscore
    if match := _INTEGER.fullmatch(digits):
        sign, number = match.groups()
        base = 8 if re.fullmatch("0[0-7]+", number) else 0  # with 0, the prefix determines the base
        return int(sign + number, base) if len(digits) <= _MAX_DIGITS else None
    if _FLOAT.fullmatch(digits) and math.isfinite(figure := float(digits)):
        return int(figure)
    return None


_NOTHING: Final = yaml.ScalarNode(f"{_TAG}null", "")


def _composed(text: str, origin: str) -> yaml.Node | None:
    """Parse the first YAML document of a file into nodes. Further documents are ignored."""
    try:
        _check_depth(text, origin)
        loader = _LOADER(text)
        try:
            return cast("yaml.Node", loader.get_node()) if loader.check_node() else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        position = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"cannot read {origin}: {position}{exc.problem or exc.context}") from exc
    except yaml.reader.ReaderError as exc:
        raise ConfigError(f"cannot read {origin}: line {_line(text, exc.position)}: {exc.reason}") from exc
    except UnicodeEncodeError as exc:
        raise ConfigError(
            f"cannot read {origin}: line {_line(text, exc.start)}: found bytes that are not text"
        ) from exc


def _line(text: str, at: int) -> int:
    """Return the number of the line that contains offset ``at``."""
    return text.count("\n", 0, at) + 1


def _check_depth(text: str, origin: str) -> None:
    """Raise ``ConfigError`` if the document is nested too deeply. Composing is recursive, so such a document would
    overflow the stack and crash the process.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentEndEvent):
            return
        if depth > MAX_DEPTH:
            position = f"line {_line_of(event)}"
            raise ConfigError(
                f"cannot read {origin}: {position}: found more than {MAX_DEPTH} levels, expected a bpm.yml"
            )
