"""Defines exception classes, one for each kind of error that is caught somewhere.

Messages read ``cannot X: why`` and name the object and the place. A message that the Director compares with a fixed
string is the same as the Go agent's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ShimError(Exception):
    """Base class of the errors that agent_shim itself raises. A command that fails with one of them exits with
    ``exit_code``.
    """

    exit_code = 70


class ConfigError(ShimError):
    """An input file is invalid, for example agent.json, the settings, a monit file or bpm.yml."""

    exit_code = 78


class SettingsError(ConfigError):
    """The settings from the CPI cannot be used. If a member is invalid, the message contains its JSON path."""


class NotThereError(ShimError):
    """A directory, job or service given on the command line does not exist, or the user is not allowed to read it."""

    exit_code = 66


class BootError(ShimError):
    """A required boot step failed."""


class AlreadyRunningError(ShimError):
    """Another running agent uses the same base directory."""

    exit_code = 3


class BusError(ShimError):
    """The bus cannot be reached, or a message could not be sent on it."""

    exit_code = 69


class CredentialsError(BusError):
    """Our bus credentials are invalid: the certificate, key or CA cannot be read, or the server rejects them."""


class NoAgentError(ShimError):
    """No agent answers on the control socket."""

    exit_code = 69


class ActionError(ShimError):
    """An action failed. The message is sent to the Director in ``exception.message``."""


class BadArgumentsError(ActionError):
    """The arguments of a request do not fit the action."""


class UnknownActionError(ActionError):
    """A request names a method that is not an action."""


class TaskNotFoundError(ActionError):
    """There is no task with the requested id, or the task has already been forgotten."""


class DigestError(ActionError):
    """A digest string is invalid, or data does not match its digest."""


class ArchiveError(ActionError):
    """An archive is invalid or malicious. All files unpacked from it have been removed."""


class BlobError(ActionError):
    """A blob cannot be fetched or stored."""


class LastingError(BlobError):
    """A blob error that a retry cannot fix, because this machine's disk is full or the URL is invalid."""


class HostError(OSError):
    """A system call failed. The exception has the ``errno``, and its message says what was attempted (``cannot mount /a
    on /b``).
    """


@contextmanager
def errors_as(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert exceptions of the given kinds, by default ``OSError``, to an ``ActionError`` with the message "WHAT:
    why".
    """
    wanted = kinds or (OSError,)
    try:
        yield
    except wanted as exc:
        raise ActionError(f"{what}: {exc}") from exc
