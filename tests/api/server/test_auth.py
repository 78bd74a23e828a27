"""Keys: plain and hashed, wrong and right, and what may be reached without one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ramet import InvalidInput
from ramet.api.server.auth import is_loopback, load_keys
from ramet.api.server.settings import Settings

KEY, OTHER = "sk-first-0001", "sk-other-0002"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_without_keys_everybody_is_one_tenant() -> None:
    keys = load_keys((), None)
    assert not keys.required
    assert keys.tenant_of(None) == keys.tenant_of(b"Bearer whatever") == "local"


def test_each_plain_key_is_a_tenant(tmp_path: Path) -> None:
    keys = load_keys((KEY, OTHER), None)
    tenants = {keys.tenant_of(b"Bearer " + key.encode()) for key in (KEY, OTHER)}
    assert len(tenants) == 2 and None not in tenants
    assert KEY not in repr(vars(keys))  # only hashes are kept
    for wrong in (None, b"", b"Bearer", b"Bearer ", KEY.encode(), b"Basic " + KEY.encode(), b"Bearer \xff"):
        assert keys.tenant_of(wrong) is None
    assert keys.tenant_of(b"bearer  " + KEY.encode() + b" ") in tenants


def test_a_file_of_hashes_names_tenants_and_may_give_one_two_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# comment\n\nlab sha256:{digest(KEY)}\nlab sha256:{digest(OTHER)}\n")
    keys = load_keys((), file)
    assert keys.tenant_of(f"Bearer {KEY}".encode()) == keys.tenant_of(f"Bearer {OTHER}".encode()) == "lab"


@pytest.mark.parametrize("line", [KEY, f"lab {KEY}", "lab sha256:abc", f"a b sha256:{digest(KEY)}", "#"])
def test_a_bad_file_is_refused_without_showing_it(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(InvalidInput) as caught:
        load_keys((), file)
    assert KEY not in str(caught.value)
    with pytest.raises(InvalidInput):
        load_keys((), tmp_path / "missing")


@pytest.mark.parametrize("key", ["short", "with space inside", "k" * 513, "kéy-is-not-ascii"])
def test_a_bad_key_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_keys((key,), None)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("localhost.example.org", False),
    ],
)
def test_any_address_but_loopback_needs_keys(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    Settings(host=host, has_keys=True)
    if expected:
        Settings(host=host)
    else:
        with pytest.raises(InvalidInput, match="--api-key"):
            Settings(host=host)
