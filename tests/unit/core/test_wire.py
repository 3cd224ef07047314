"""Tests which requests are valid, and how replies are truncated."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_shim.core import wire


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"ping"',
        b"{} trailing",
        b'{"protocol":"3"}',
        b'{"protocol":3.0}',
        b'{"protocol":3.5}',
        b'{"reply_to":7}',
        b'{"method":{}}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"ignored":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"ignored":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_requests_that_go_cannot_decode_are_rejected(raw: bytes) -> None:
    with pytest.raises(wire.RequestError):
        wire.decode_request(raw)


@pytest.mark.parametrize("raw", [b'{"METHOD":"a","method":"b"}', b'{"method":"a","METHOD":"b"}'])
def test_last_request_member_wins_if_names_differ_only_in_case(raw: bytes) -> None:
    assert wire.decode_request(raw).method == "b"


def test_reply_whose_size_equals_the_limit_is_sent_unchanged() -> None:
    text = "x" * (wire.MAX_REPLY_BYTES - len(b'{"value":""}'))

    assert len(wire.encode_value(text, limit=wire.MAX_REPLY_BYTES)) == wire.MAX_REPLY_BYTES


def test_reply_over_https_has_no_size_limit() -> None:
    assert len(wire.encode_value("x" * 2 * wire.MAX_REPLY_BYTES, limit=None)) > 2 * wire.MAX_REPLY_BYTES


def test_empty_exception_message_is_omitted() -> None:
    assert wire.encode_exception("") == b'{"exception":{}}'


@given(st.text(min_size=1, max_size=400), st.integers(min_value=120, max_value=300))
def test_long_exception_message_is_truncated_in_the_middle(text: str, limit: int) -> None:
    reply = wire.encode_exception(text, limit=limit)

    assert len(reply) <= limit
    message = json.loads(reply)["exception"]["message"]
    if message != text:
        head, tail = message.split(wire.TRUNCATED)
        assert text.startswith(head)
        assert text.endswith(tail)


def test_reply_truncation_counts_json_escapes() -> None:
    reply = wire.encode_exception('"\n' * wire.MAX_REPLY_BYTES, limit=wire.MAX_REPLY_BYTES)

    assert wire.MAX_REPLY_BYTES * 0.9 < len(reply) <= wire.MAX_REPLY_BYTES


def test_undecodable_script_output_can_be_sent() -> None:
    assert json.loads(wire.encode_exception("bad \udcff byte"))["exception"]["message"] == "bad ? byte"


class _Untyped(msgspec.Struct, frozen=True):
    anything: object = None


def test_untyped_message_members_are_kept_unchanged() -> None:
    raw = {"anything": {"Keep": None, "list": [None, 1, 2.0]}}

    assert wire.convert(raw, _Untyped).anything == raw["anything"]


class _Marked(msgspec.Struct, frozen=True):
    ours: wire.Lenient[str] = "default"
    inner: wire.Internal[str] = "untouched"


def test_lenient_member_with_the_wrong_type_is_ignored_and_reported() -> None:
    ignored: list[str] = []

    assert wire.convert({"Ours": 5, "inner": "set"}, _Marked, ignored) == _Marked()
    assert ignored == ["Ours: Expected `str`, got `int`"]


@pytest.mark.parametrize("begin", [b'"', b"[" * 500 + b'"', b'{"a":"'], ids=["text", "deep", "member"])
def test_unterminated_megabyte_string_is_rejected_quickly(begin: bytes) -> None:
    """If the parser searched for the end of the string again after each escaped quote, it would take hours."""
    with pytest.raises(wire.RequestError):
        wire.decode_request(begin + b'\\"' * 500_000)


def test_megabyte_of_invalid_utf_8_in_a_request_is_accepted() -> None:
    """Go accepts such a request as well."""
    request = wire.decode_request(b'{"method":"ping","arguments":["' + b"\xff" * 1_000_000 + b'"]}')

    assert request.arguments == ["\ufffd" * 1_000_000]
