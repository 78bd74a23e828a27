"""The workloads of `ramet bench cpu`, cut so that a CPU with two cores does them in minutes."""

from __future__ import annotations

from typing import Any

from ramet.api.workloads import Call, Workload, build

VOCAB_SIZE = 49_152  # the embedded model's
MAX_ROWS = 16

SIZES: dict[str, dict[str, Any]] = {
    "W1": {"prompts": 8, "prompt_length": 128, "output_length": 32},
    "W2": {"prompt_length": 512, "samples": 16, "output_length": 64},
    "W3": {"root_length": 256, "levels": 3, "kept": 4, "branching": 4, "thought_length": 32},
    "W4": {"trees": 4, "root_length": 128, "rollouts": 6, "tool_length": (16, 48), "output_length": 32},
    "W5": {"prompts": 2, "prompt_length": 128, "width": 4, "output_length": 32},
    "W6": {"sessions": 4, "system_length": 256, "turns": 3, "user_length": 32, "output_length": 32},
    "W7": {"document_length": 1024, "questions": 8, "question_length": 32, "output_length": 32},
    "W8": {
        "trees": 2,
        "root_length": 256,
        "rollouts": 16,
        "tool_length": (16, 48),
        "output_length": 32,
        "parallel": 8,
    },
    "W9": {"prompts": 1, "prompt_length": 128, "width": 16, "output_length": 32},
}
#: Two more shapes, for single numbers: a prefill of 512 tokens, and steps of one row.
PROBES: dict[str, dict[str, Any]] = {
    "prefill": {"prompts": 1, "prompt_length": 512, "output_length": 1},
    "one_row": {"prompts": 1, "prompt_length": 64, "output_length": 33},
}


def make(name: str, seed: int, *, tiny: bool = False) -> Workload:
    """A workload or probe by its name, with no more than MAX_ROWS sequences at once."""
    if name in PROBES:
        # Seeds of their own: prompts that W1 has, too, would be found in a cache.
        offset = 1000 * (1 + list(PROBES).index(name))
        made = build("W1", seed=seed + offset, vocab_size=VOCAB_SIZE, **PROBES[name])
    else:
        made = build(name, seed=seed, vocab_size=VOCAB_SIZE, tiny=tiny, **({} if tiny else SIZES[name]))
    assert made.totals().most_sequences_at_once <= MAX_ROWS, "cut to a CPU's size"
    return made


def calls_after(workload: Workload, index: int) -> list[Call]:
    """The calls of all rounds after round `index`: what must be kept for them is known beforehand."""
    return [call for calls in workload.rounds[index + 1 :] for call in calls]
