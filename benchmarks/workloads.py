"""The workloads W1 to W9. They live in the package, so that `ramet bench cpu` works from a wheel."""

from __future__ import annotations

from ramet.api.workloads import (
    WORKLOADS,
    Call,
    Draw,
    Request,
    Text,
    Totals,
    Workload,
    build,
    main,
    random_engine,
    resolve,
    run_rounds,
)

__all__ = [
    "WORKLOADS",
    "Call",
    "Draw",
    "Request",
    "Text",
    "Totals",
    "Workload",
    "build",
    "random_engine",
    "resolve",
    "run_rounds",
]

if __name__ == "__main__":
    main()
