"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Device = Annotated[str, typer.Option(help="auto (the first GPU, or else the CPU), cpu, cuda or cuda:1.")]
DtypeOption = Annotated[Dtype, typer.Option(help="auto is bfloat16 where the processor is fast at it.")]
NumBlocks = Annotated[int | None, typer.Option(help="Blocks in the pool; None: sized from free memory.")]
BlockSize = Annotated[int, typer.Option(help="Token slots of a block.")]
