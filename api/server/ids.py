"""Names that the server gives: a kind, and 96 random bits that nobody can guess."""

from __future__ import annotations

import secrets


def new_id(kind: str) -> str:
    """For example `br_…`; the kind says what it is the name of."""
    return f"{kind}{secrets.token_hex(12)}"
