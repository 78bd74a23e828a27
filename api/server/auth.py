"""Who is asking: API keys, each of which stands for a tenant. Only their SHA-256 is kept.

A plain hash is enough for random keys; it is no protection for short ones that somebody can guess.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ramet.engine.errors import InvalidInput

OPEN_TENANT = "local"  # of everybody, where no key is asked for
_LINE = re.compile(r"(?P<tenant>[A-Za-z0-9._-]{1,64})\s+sha256:(?P<digest>[0-9a-f]{64})")
_KEY = re.compile(r"[\x21-\x7e]{8,512}")


class Keys:
    """Digests of keys and the tenants they stand for; without any, everybody is one tenant."""

    def __init__(self, tenants: Mapping[str, str] | None = None) -> None:
        self._tenants = dict(tenants or {})

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, authorization: bytes | None) -> str | None:
        """The tenant of an Authorization header; None if it holds no known key."""
        if not self._tenants:
            return OPEN_TENANT
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        # Looked up by digest: how long that takes says nothing about the key.
        return self._tenants.get(hashlib.sha256(key.strip()).hexdigest())


def load_keys(keys: Iterable[str], file: Path | None) -> Keys:
    """The keys given in plain, each a tenant of its own, and those of a file of `tenant sha256:digest` lines.

    Raises InvalidInput, which never shows a key.
    """
    tenants: dict[str, str] = {}
    for key in keys:
        if not _KEY.fullmatch(key):
            raise InvalidInput("--api-key", "must be 8 to 512 printable ASCII characters without spaces")
        digest = hashlib.sha256(key.encode()).hexdigest()
        tenants[digest] = f"key-{digest[:12]}"
    if file is not None:
        tenants.update(_read(file))
    return Keys(tenants)


def _read(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("--api-keys-file", f"cannot be read ({type(error).__name__})", str(file)) from None
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise InvalidInput(
                "--api-keys-file",
                f"line {number} must be `tenant sha256:digest`; `printf %s KEY | sha256sum` prints a digest",
            )
        tenants[match["digest"]] = match["tenant"]
    if not tenants:
        raise InvalidInput("--api-keys-file", "must hold at least one key", str(file))
    return tenants


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
