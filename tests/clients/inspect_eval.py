# needs: inspect-ai==0.3.285 openai==3.57.0
"""A small evaluation with inspect-ai: several choices, and log-probabilities of their tokens."""

from __future__ import annotations

import os
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

os.environ["RAMET_BASE_URL"] = f"{sys.argv[1]}/v1"
os.environ["RAMET_API_KEY"] = "unused"
samples = [
    Sample(input="What is the capital of France?", target="Paris"),
    Sample(input="Say hello.", target="h"),
]
task = Task(dataset=samples, solver=generate(), scorer=includes())
config = GenerateConfig(num_choices=2, logprobs=True, top_logprobs=2, max_tokens=16, temperature=0.5, seed=1)
with tempfile.TemporaryDirectory() as folder:
    (log,) = eval(
        task,
        model="openai-api/ramet/smollm2",
        log_dir=folder,
        display="none",
        **config.model_dump(exclude_none=True),
    )
    assert log.status == "success", log.error
    assert log.samples is not None and len(log.samples) == 2
    for sample in log.samples:
        assert len(sample.output.choices) == 2
        for choice in sample.output.choices:
            assert choice.logprobs is not None and choice.logprobs.content
            assert all(len(row.top_logprobs or ()) == 2 for row in choice.logprobs.content)
