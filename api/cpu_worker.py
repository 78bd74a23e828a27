"""One engine in a process of its own, so that no two thread pools meet: it reads jobs, it writes results.

    python -m ramet.api.cpu_worker ENGINE THREADS

Each line of input is a JSON list [workload, seed, tiny]; each line of output a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    engine_name, threads = sys.argv[1], int(sys.argv[2])
    # What belongs to the results goes where nothing else is printed.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=results, flush=True)

    from ramet.api.cpu_result import Skipped
    from ramet.api.cpu_sizes import make

    try:
        engine = _make_engine(engine_name, threads)
    except Skipped as reason:
        say({"skipped": str(reason)})
        return
    say({"ready": True, **_facts(engine_name, engine)})
    for line in sys.stdin:
        name, seed, tiny = json.loads(line)
        try:
            say(engine.run(make(name, seed, tiny=tiny)).to_json())
        except Skipped as reason:
            say({"skipped": str(reason)})
        except Exception as error:  # one workload that fails is a line in the table, not the end
            say({"skipped": f"failed: {type(error).__name__}: {error}"})


def _make_engine(name: str, threads: int) -> Any:
    if name == "llama.cpp":
        from ramet.api.cpu_llamacpp import LlamaCpp

        return LlamaCpp(threads)
    import torch

    torch.set_num_threads(threads)
    if name == "ramet":
        from ramet.api.cpu_ramet import Ramet

        return Ramet()
    from ramet.api.cpu_peers import Generate, GenerateBatch

    made: dict[str, Callable[[], Any]] = {
        "generate bf16": lambda: Generate(torch.bfloat16),
        "generate fp32": lambda: Generate(torch.float32),
        "generate_batch": lambda: GenerateBatch(torch.float32),
    }
    return made[name]()


def _facts(name: str, engine: Any) -> dict[str, Any]:
    """What only this process knows: the bytes of the weights, and how long they take to stream."""
    if name != "ramet":
        return {}
    from ramet.api.cpu_ramet import stream_seconds

    model = engine.llm.engine.runner.model
    num_bytes = sum(p.numel() for p in model.module.parameters()) * model.dtype.itemsize
    dtype = str(model.dtype).removeprefix("torch.")
    return {"weight_bytes": num_bytes, "stream_s": stream_seconds(num_bytes), "dtype": dtype}


if __name__ == "__main__":
    main()
