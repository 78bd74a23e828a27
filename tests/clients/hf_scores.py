"""Log-likelihoods as lm-eval's `hf` model computes them: whole sequences at once, transformers in float32.

Runs in ramet's own environment; pairs of (context, continuation) come as JSON on standard input.
"""

from __future__ import annotations

import json
import sys

import torch

from ramet.engine.model_files import load_default

files = load_default(torch.float32, None)
scores = []
for context, continuation in json.load(sys.stdin):
    ids = files.tokenizer(context + continuation)["input_ids"]
    start = len(files.tokenizer(context)["input_ids"])
    with torch.no_grad():
        logprobs = files.module(torch.tensor([ids])).logits[0].log_softmax(-1)
    scores.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids))))
print(json.dumps(scores))
