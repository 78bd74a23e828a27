"""Values of options that several commands have."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
