"""Serve a request: take its bytes and return the bytes of the response, even if an error occurs.

The request and response formats match those of the Director (clouds/external_cpi.rb) and the CLI
(cloud/cpi_cmd_runner.go).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kubernetes_cpi import log
from kubernetes_cpi.errors import CpiError, InputError

INFO: Final = {"api_version": 3, "stemcell_formats": ["kubernetes-light", "docker-light", "warden-light"]}
"""Response to the `info` method. The Director calls it before every other method (cloud_factory.rb), so it must work
without a cluster and without a configuration.
"""
USAGE: Final = "usage: python -m kubernetes_cpi [--config FILE] <REQUEST >RESPONSE"


class CpiRequest(msgspec.Struct, frozen=True):
    """A request from a Director or the CLI. Unknown members are ignored."""

    method: str
    arguments: list[Any] = []
    context: dict[str, Any] | None = None
    api_version: int | None = None


class Failure(msgspec.Struct, frozen=True):
    """The error in a response. The Director converts ``type`` to an exception class."""

    type: str
    message: str
    ok_to_retry: bool


class CpiResponse(msgspec.Struct, frozen=True):
    result: Any
    error: Failure | None
    log: str


def answer(raw: bytes, arguments: Sequence[str]) -> bytes:
    """Return the response to a request. Never raises."""
    began = time.monotonic()
    log.reset()
    name, result, error = "request", None, None
    try:
        config = _config_file(arguments)
        try:
            request = msgspec.json.decode(raw, type=CpiRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise InputError(f"cannot read the request: {exc}") from None
        name = request.method
        if name == "info":
            result = INFO
        else:
            from kubernetes_cpi import methods

            result = methods.call(name, request.arguments, request.context or {}, config)
    except CpiError as exc:
        error = Failure(exc.type_name, log.redacted(f"{exc}"), exc.ok_to_retry)
    except Exception as exc:  # noqa: BLE001 - a bug also needs a response; its traceback goes to stderr
        import traceback

        # Leave out the exception's message, because it may quote a secret in a form that redaction does not recognize.
        frames = traceback.extract_tb(exc.__traceback__)
        message = (
            f"cannot {name}: {type(exc).__name__} in {frames[-1].name}, a bug in this CPI; its log has the traceback"
        )
        log.say("".join(frames.format()) + message)
        error = Failure(CpiError.type_name, message, False)
    response = CpiResponse(result, error, log.summary(name, time.monotonic() - began))
    try:
        return msgspec.json.encode(response)
    except (TypeError, ValueError, RecursionError, msgspec.EncodeError) as exc:
        failure = Failure(CpiError.type_name, f"cannot write the result: {exc}", False)
        return msgspec.json.encode(CpiResponse(None, failure, ""))


def _config_file(arguments: Sequence[str]) -> str:
    """Return the path after ``--config``, or "" if the configuration is only in the request's context."""
    match arguments:
        case []:
            return ""
        case ["--config", file]:
            return file
    sys.stderr.write(USAGE + "\n")
    raise InputError(f"cannot read the command line: {USAGE}")
