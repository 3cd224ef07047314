"""What can go wrong, one class for each thing that somebody catches.

Texts read ``cannot X: why`` and name the thing and the place; what a Director compares (a few texts of the Go agent) is
kept to the letter where it is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ShimError(Exception):
    """Anything we say on purpose; ``exit_code`` is what a command ends with when nobody catches it."""

    exit_code = 70


class ConfigError(ShimError):
    """A file given to us is wrong: agent.json, settings, monit file, bpm.yml."""

    exit_code = 78


class SettingsError(ConfigError):
    """The settings of the CPI cannot be used; the text names the JSON path."""


class BootError(ShimError):
    """A boot step that nothing can do without has failed."""


class AlreadyRunningError(ShimError):
    """Another agent works on the same base directory."""

    exit_code = 3


class BusError(ShimError):
    """The bus cannot be reached, or a message did not get onto it."""

    exit_code = 69


class CredentialsError(BusError):
    """Our side of a bus cannot be used as it is: certificate, key or CA are unreadable, or the server refuses them."""


class NoAgentError(ShimError):
    """No agent answers on the control socket."""

    exit_code = 69


class ActionError(ShimError):
    """An action failed; the text goes to the Director inside ``exception.message``."""


class BadArgumentsError(ActionError):
    """The arguments of a request do not fit the action."""


class UnknownActionError(ActionError):
    """No action has this method name."""


class TaskNotFoundError(ActionError):
    """No task has this id (any more)."""


class DigestError(ActionError):
    """A digest string cannot be read, or bytes do not have the digest they should have."""


class ArchiveError(ActionError):
    """An archive is broken or hostile; nothing of it is in place."""


class BlobError(ActionError):
    """A blob cannot be fetched or stored."""


class NoRoomError(BlobError):
    """The disk of this machine does not take a blob: another attempt would fail too."""


class HostError(OSError):
    """The kernel said no: keeps ``errno`` and says what was tried (``cannot mount /a on /b``)."""


@contextmanager
def errors_as(what: str) -> Iterator[None]:
    """Whatever the system refuses in the block is an ``ActionError`` with the text ``WHAT: why``."""
    try:
        yield
    except OSError as exc:
        raise ActionError(f"{what}: {exc}") from exc
