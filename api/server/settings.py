"""How a server is set up: plain values, checked once, from flags, the environment and a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ramet.api.server.auth import is_loopback
from ramet.engine.checks import check_float, check_int
from ramet.engine.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Raises InvalidInput, which names the flag and its limit.

    Attributes:
        model_names: what the model is called in requests; the first is how it is called in answers.
        host: an address to listen on; any but a loopback one needs API keys.
        port: 0 takes a free one.
        has_keys: whether a key is asked for.
        open_paths: paths, beside /health, that need no key.
        cache_scope: whether tenants find each other's cached prefixes ("global"), or not ("tenant").
        max_body_bytes: a longer request is refused unread.
        max_running: requests of one tenant at the same time; more get a 429.
        branch_ttl: seconds after its last use that a branch is let go of.
        max_pinned_ratio: the part of all blocks that pinned branches may hold.
        shutdown_timeout: seconds that running requests have to end when the server is stopped.
        vllm_metrics: whether /metrics has the names of vLLM's as well.
        docs: whether /docs and /openapi.json are there.
    """

    model_names: tuple[str, ...] = ("smollm2",)
    host: str = "127.0.0.1"
    port: int = 8000
    has_keys: bool = False
    open_paths: tuple[str, ...] = ()
    cache_scope: Literal["tenant", "global"] = "tenant"
    max_body_bytes: int = 16 << 20
    max_running: int = 256
    branch_ttl: float = 86_400.0
    max_pinned_ratio: float = 0.0
    shutdown_timeout: float = 30.0
    vllm_metrics: bool = False
    docs: bool = True

    def __post_init__(self) -> None:
        check_int("--port", self.port, 0, 65535)
        check_int("--max-body-bytes", self.max_body_bytes, 1024, 1 << 30)
        check_int("--max-concurrent-requests", self.max_running, 1, 1 << 16)
        check_float("--branch-ttl", self.branch_ttl, 1.0, 365 * 86_400.0)
        check_float("--max-pinned-ratio", self.max_pinned_ratio, 0.0, 1.0)
        check_float("--shutdown-timeout", self.shutdown_timeout, 0.0, 3600.0)
        if not self.model_names or not all(self.model_names):
            raise InvalidInput("--served-model-name", "must not be empty")
        if not self.has_keys and not is_loopback(self.host):
            raise InvalidInput("--host", "beyond this machine needs --api-key or --api-keys-file", self.host)


def read_config(path: Path, known: set[str]) -> dict[str, Any]:
    """The options in a TOML file, named as the flags are, with - or _. Raises InvalidInput."""
    try:
        options = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("--config", f"cannot be read ({type(error).__name__})", str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput("--config", f"is not TOML: {error}", str(path)) from None
    named = {name.replace("-", "_"): value for name, value in options.items()}
    unknown = sorted(set(named) - known)
    if unknown:
        raise InvalidInput("--config", f"has unknown options: {', '.join(unknown)}")
    return named
