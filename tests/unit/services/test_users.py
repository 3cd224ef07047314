"""Requests to ``ssh``: the refused ones before any change, and the commands of the others."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.paths import Paths
from agent_shim.host import command
from agent_shim.services import users
from agent_shim.services.users import Users, compile_pattern

KEY = "ssh-rsa AAAAB3NzaC1yc2E= jane@laptop with words"


@pytest.fixture
def ours(tmp_path: Path) -> Users:
    return Users(Paths(tmp_path))


@pytest.mark.parametrize(
    "user",
    [
        "",
        "_bosh",
        "9bosh",
        "bosh_A",
        "bosh_a b",
        "bosh_a\n",
        "bosh_a;id",
        "-bosh_a",
        "bosh_" + "a" * 28,
        "bosh_ä",
    ],
)
async def test_a_name_that_is_none_is_refused(ours: Users, user: str) -> None:
    """No option gets into a command, no field into a file."""
    with pytest.raises(ActionError, match="^Creating user: cannot use the name "):
        await ours.setup(user, KEY)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "two words",
        "cert-authority ssh-rsa AAAA",
        f"{KEY}\nssh-rsa AAAA",
        f"{KEY}\r\nssh-rsa AAAA",
        f'command="id" {KEY}',
        "ssh-rsa !!!",
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
async def test_a_key_that_is_none_is_refused(ours: Users, key: str) -> None:
    """One line, no options; the error does not repeat it."""
    with pytest.raises(ActionError) as failed:
        await ours.setup("bosh_a", key)

    assert str(failed.value) == "Setting ssh public key: cannot use it: it is not one line with type and key"


@pytest.mark.parametrize(
    "key",
    [
        KEY,
        KEY + "\n",
        "ssh-ed25519 AAAA",
        "ecdsa-sha2-nistp256 AAAA/+== x",
        "sk-ssh-ed25519@openssh.com AAAA",
    ],
)
async def test_below_another_base_the_machine_is_left_alone(ours: Users, key: str) -> None:
    """A valid request fails with a reason there, and a clean-up finds no user."""
    with pytest.raises(ActionError, match=r"^Creating user: the agent works below .* may not change the machine$"):
        await ours.setup("bosh_a", key)

    assert await ours.cleanup("^bosh_") == []


@pytest.mark.parametrize(
    ("pattern", "found", "missed"),
    [
        ("^bosh_abc123", ["bosh_abc123", "bosh_abc1234"], ["xbosh_abc123", "bosh_abc12"]),
        ("^bosh_abc$", ["bosh_abc"], ["bosh_abcd"]),
        ("bosh_[a-f0-9]+$", ["bosh_af0"], ["bosh_xyz"]),
        ("^(bosh_a|bosh_b)$", ["bosh_a", "bosh_b"], ["bosh_ab"]),
        (r"^bosh_\d{3}$", ["bosh_123"], ["bosh_12"]),
        (r"^bosh_.*", ["bosh_x"], ["vcap"]),
        ("", ["bosh_x"], []),
    ],
)
def test_patterns_find_what_they_find_in_go(pattern: str, found: list[str], missed: list[str]) -> None:
    """They are searched for, not matched from the beginning."""
    compiled = compile_pattern(pattern)

    assert [name for name in [*found, *missed] if compiled.search(name)] == found


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        "a*a*a*a*b",
        "(?=bosh)",
        "(?P<x>a)",
        r"(a)\1",
        "[[:alpha:]]",
        "(",
        ")",
        "[",
        "a**",
        "a{1000}",
        "x" * 129,
        "bosh\n_",
        "^*",
        r"\Qa",
    ],
)
def test_patterns_that_differ_or_take_for_ever_are_refused(pattern: str) -> None:
    """The error names the pattern and its fault."""
    with pytest.raises(ActionError) as failed:
        compile_pattern(pattern)

    assert str(failed.value).startswith(
        f"SSH Cleanup: Deleting Ephemeral Users: cannot use the expression {pattern[:128]!r}: "
    )


pieces = st.sampled_from(
    ["a", "a*", "a+", "(", ")", "|", "a?", "[ab]", "[ab]*", ".*", ".{9,99}", "^", "$", r"\w+", "{"]
)


@given(st.lists(pieces, max_size=40).map("".join) | st.text(max_size=40))
def test_every_pattern_ends_soon(pattern: str) -> None:
    """Refused or found in bounded time, also in the name that is worst for it."""
    begun = time.process_time()
    with contextlib.suppress(ActionError):
        compile_pattern(pattern).search("bosh_" + "a" * 27)

    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize("hashed", ["", "a b", "a:b", "a\nroot:x", "a\0"])
async def test_a_hash_that_would_be_more_is_refused(ours: Users, hashed: str) -> None:
    """The error does not repeat it."""
    with pytest.raises(ActionError) as failed:
        await ours.set_passwords(hashed, keep_root=False)

    assert str(failed.value) == "cannot set the password of root and vcap: it is not a crypt hash"


@pytest.mark.parametrize("user", ["root", "vcap", "", "xbosh_a"])
async def test_nobody_else_is_removed(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any caller the tool is not even started."""
    started: list[str] = []

    async def never(*argv: str) -> str:
        started.extend(argv)
        return ""

    monkeypatch.setattr(command, "run", never)

    with pytest.raises(HostError, match="not a user of ours$"):
        await users._remove(user)

    assert started == []


async def test_a_user_is_made_for_a_key_and_removed_with_those_alone_that_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(tmp_path)
    paths.is_system, paths.etc = True, tmp_path
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/root:/bin/bash\nvcap:x:1000:1000::/home/vcap:/bin/bash\n")
    ran: list[tuple[str, ...]] = []
    keys: dict[str, str] = {}

    async def run(*argv: str, given: str = "", user: str = "", **_: object) -> str:
        ran.append(argv)
        if argv[0] == "useradd":
            passwd.write_text(passwd.read_text() + f"{argv[-1]}:x:1001:1001::{paths.ssh_home}/{argv[-1]}:/bin/bash\n")
        elif argv[0] == "/bin/sh":
            keys[user] = given
        return ""

    async def remove(user: str) -> None:
        ran.append(("remove", user))

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(users, "_remove", remove)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    ours = Users(paths)
    for user in ("bosh_jane", "bosh_joe"):
        await ours.setup(user, KEY)

    assert ours.made() == ["bosh_jane", "bosh_joe"]
    assert keys == {"bosh_jane": KEY, "bosh_joe": KEY}
    assert ran[:2] == [
        ("useradd", "-m", "-b", str(paths.ssh_home), "-s", "/bin/bash", "bosh_jane"),
        ("usermod", "-G", users.GROUPS, "bosh_jane"),
    ]
    assert await ours.cleanup("^bosh_ja") == ["bosh_jane"]
    assert ran[-1] == ("remove", "bosh_jane")
