"""`ramet plan`: how many branches fit into so much memory, before anything is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from ramet.engine.capacity import Capacity, Load, ModelSize, Way, capacity

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_LIMITS = {
    "blocks": "the pool's blocks",
    "weights": "the weights leave no room for one branch",
    "context": "the model's context is shorter than prompt and new tokens",
}


class PlanDtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def parse_memory(text: str) -> int:
    """Bytes of "80GB" (10^9 each), "80GiB" (2^30 each), "512M" or "1000". Raises typer.BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is None or (match[3] and not match[2]):
        raise typer.BadParameter(f"{text!r} is no size like 80GB or 24GiB", param_hint="--memory")
    size = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]]
    if size >= 2**63:
        raise typer.BadParameter(f"{text[:20]!r} is beyond what 64 bits address", param_hint="--memory")
    return int(size)


def plan(
    model: Annotated[
        str, typer.Argument(help="smollm2, a folder with a config.json, a .gguf file, a cached hub id.")
    ],
    memory: Annotated[str, typer.Option(help="What the device has: 80GB, 24GiB, ...")],
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that all branches start with.")] = 4096,
    branches: Annotated[int, typer.Option(min=1, help="How many you want.")] = 64,
    new: Annotated[int, typer.Option(min=1, help="Tokens that each branch adds.")] = 256,
    block_size: Annotated[int, typer.Option(min=1, max=256, help="Token slots of a block.")] = 16,
    dtype: Annotated[PlanDtype, typer.Option(help="Of the weights and the KV cache.")] = PlanDtype.bfloat16,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """How many branches fit, with the prompt shared and without, before anything is loaded.

    Only the model's configuration is read. Activations are not counted: leave them a few percent.

    \b
    Examples:
      ramet plan smollm2 --memory 2GB --prompt 512 --branches 64
      ramet plan ./Llama-3.1-8B --memory 80GB --prompt 4096 --branches 64 --new 256
    """
    available = parse_memory(memory)
    load = Load(prompt=prompt, branches=branches, new=new, block_size=block_size)
    import torch

    from ramet.engine.model_size import read_model_size

    size = read_model_size(model, getattr(torch, dtype.value))
    found = capacity(size, load, available)
    if as_json:
        print(json.dumps(to_json(model, size, load, available, found)))
    else:
        show(model, size, load, available, found)


def to_json(model: str, size: ModelSize, load: Load, memory: int, found: Capacity) -> dict[str, Any]:
    sizes = {"weight_bytes": size.weight_bytes, "token_bytes": size.token_bytes}
    return {"model": model, "memory": memory, **asdict(size), **sizes, **asdict(load), **asdict(found)}


def show(model: str, size: ModelSize, load: Load, memory: int, found: Capacity) -> None:
    """The table for people, and the formula under it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model} in {_bytes(memory)}", title_justify="left")
    table.add_column("")
    table.add_column("prompt shared", justify="right")
    table.add_column("each its own", justify="right")
    ways = (found.shared, found.unshared)
    table.add_row("blocks for all branches", *(f"{way.common:,}" for way in ways))
    table.add_row("blocks for each branch", *(f"{way.own:,}" for way in ways))
    table.add_row("branches that fit", *(_count(way) for way in ways))
    wanted = (f"{_bytes(way.asked_blocks * found.block_bytes)} {_verdict(way)}" for way in ways)
    table.add_row(f"KV of {load.branches:,} branches", *wanted)
    console = Console()
    console.print(table)
    for line in formula(size, load, memory, found):
        console.print(line, highlight=False, soft_wrap=True)


def formula(size: ModelSize, load: Load, memory: int, found: Capacity) -> list[str]:
    """How the numbers come about, line by line."""
    token = f"2 x {size.num_kv_heads} KV heads x {size.head_dim} x {size.dtype_bytes} bytes"
    slots = f"{load.prompt:,} + {load.new:,} - 1"
    whole = found.unshared.own
    full = load.prompt // load.block_size
    return [
        f"weights   {size.num_parameters:,} x {size.dtype_bytes} bytes = {_bytes(size.weight_bytes)}",
        f"token     {token} = {size.token_bytes_per_layer:,} a layer, x {size.num_layers} layers ="
        f" {size.token_bytes:,} bytes",
        f"blocks    ({_bytes(memory)} - weights) / ({load.block_size} x {size.token_bytes:,}) ="
        f" {found.num_blocks:,}",
        f"own       ceil(({slots}) / {load.block_size}) = {whole:,}, the last token has no KV; shared minus"
        f" the prompt's {full:,} full blocks: {found.shared.own:,}",
        f"branches  (blocks - blocks for all) / blocks for each; more are stopped by: {_LIMITS[found.limit]}",
    ]


def _count(way: Way) -> str:
    return "no limit" if way.fits is None else f"{way.fits:,}"


def _verdict(way: Way) -> str:
    return "fits" if way.asked_fits else "does not fit"


def _bytes(count: int) -> str:
    """As vendors count: 10^9 is a GB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"
