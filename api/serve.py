"""`ramet serve`: options from flags, the environment and a TOML file, in this order of weight."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ramet.api.extras import remedy
from ramet.api.options import BlockSize, Device, Dtype, DtypeOption, NumBlocks


class MetricsCompat(StrEnum):
    none = "none"
    vllm = "vllm"


class CacheScope(StrEnum):
    tenant = "tenant"
    global_ = "global"


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Options of the file become defaults: flags and the environment outweigh them."""
    if path is not None:
        from ramet.api.server.settings import read_config

        known = {parameter.name for parameter in context.command.params if parameter.name} - {"config"}
        context.default_map = read_config(path, known)
    return path


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="smollm2 (the embedded default), a hub id, a folder, or a .gguf file.")
    ] = "smollm2",
    host: Annotated[str, typer.Option(help="Beyond this machine only with keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help="A key, and so a tenant; repeatable.")] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="Lines of `tenant sha256:digest`.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What requests call the model; repeatable.")
    ] = None,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    max_model_len: Annotated[int | None, typer.Option(help="A context limit below the model's own.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 512,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    seed: Annotated[int, typer.Option(help="Where requests without a seed get theirs from.")] = 0,
    cache_scope: Annotated[
        CacheScope, typer.Option(help="global: tenants share cached prefixes, and can tell.")
    ] = CacheScope.tenant,
    metrics_compat: Annotated[
        MetricsCompat, typer.Option(help="vllm: /metrics has vLLM's names as well.")
    ] = MetricsCompat.none,
    open_metrics: Annotated[bool, typer.Option("--open-metrics", help="/metrics needs no key.")] = False,
    max_concurrent_requests: Annotated[int, typer.Option(help="Of one tenant; more get a 429.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="A longer request is refused.")] = 16 << 20,
    branch_ttl: Annotated[float, typer.Option(help="Seconds after which an unused branch goes.")] = 86_400.0,
    max_pinned_ratio: Annotated[
        float, typer.Option(help="The part of all blocks that pinned branches may hold.")
    ] = 0.0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have to end after SIGTERM.")
    ] = 30.0,
    disable_docs: Annotated[
        bool, typer.Option("--disable-docs", "--disable-fastapi-docs", help="No /docs, no /openapi.json.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file of these options.", callback=_load_config, is_eager=True),
    ] = None,
) -> None:
    """Serve a model over HTTP, for OpenAI's clients and for branches.

    Listens on this machine only and asks for no key, unless keys are given. Each option can also come from
    the environment (RAMET_PORT for --port) or from a TOML file (--config); flags outweigh the environment,
    which outweighs the file. Logs are JSON lines on standard error.

    \b
    Examples:
      ramet serve
      ramet serve --port 9000 --served-model-name gpt-4o-mini
      RAMET_API_KEY=change-me-please ramet serve --host 0.0.0.0
      curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Hi"}'
    """
    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter("must be debug, info, warning or error", param_hint="--log-level")
    try:
        from ramet.api.server.auth import load_keys
        from ramet.api.server.run import run
        from ramet.api.server.settings import Settings
    except ModuleNotFoundError as error:
        message = f"needs the package {error.name}: {remedy('serve')}"
        raise typer.BadParameter(message, param_hint="serve") from None
    keys = load_keys(api_key or (), api_keys_file)
    settings = Settings(
        model_names=tuple(served_model_name or (model,)),
        host=host,
        port=port,
        has_keys=keys.required,
        open_paths=("/metrics",) if open_metrics else (),
        cache_scope=cache_scope.value,
        max_body_bytes=max_body_bytes,
        max_running=max_concurrent_requests,
        branch_ttl=branch_ttl,
        max_pinned_ratio=max_pinned_ratio,
        shutdown_timeout=shutdown_timeout,
        vllm_metrics=metrics_compat is MetricsCompat.vllm,
        docs=not disable_docs,
    )
    engine: dict[str, Any] = {
        "device": device,
        "dtype": dtype.value,
        "max_model_len": max_model_len,
        "max_batch_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "seed": seed,
    }
    run(model, engine, settings, keys, log_level)
