# needs: lm-eval[api]==0.4.13
"""lm-eval's local-completions: the log-likelihoods of its `hf` model, and the second time from the cache."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, own_python = sys.argv[1:]
# As long as a few examples in a prompt are: what fills no whole block is not found again.
SHOTS = "".join(f"Question: what is {n} plus {n}? Answer: {n + n}\n" for n in range(2, 24))
QUESTION = "Question {}: how many legs does a spider have? Answer:"
PAIRS = [
    (SHOTS + "The capital of France is", " Paris"),
    (SHOTS + "The capital of France is", " a city on the river Seine."),
    (SHOTS + "Water boils at a temperature of one hundred", " degrees"),
    (SHOTS + "def add(a, b):\n    return", " a + b\n"),
    *((SHOTS + QUESTION.format(index), f" {count}") for index in range(4) for count in ("six", "eight legs")),
]


def prefix_tokens() -> tuple[float, float]:
    """Cached and computed so far."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    cached, computed = (
        float(re.findall(rf'^ramet_prefix_tokens_total{{source="{name}"}} (\S+)$', text, re.MULTILINE)[0])
        for name in ("cached", "computed")
    )
    return cached, computed


def ask() -> list[tuple[float, bool]]:
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    found: list[tuple[float, bool]] = model.loglikelihood(requests, disable_tqdm=True)
    return found


command = [own_python, str(Path(__file__).with_name("hf_scores.py"))]
done = subprocess.run(command, input=json.dumps(PAIRS), stdout=subprocess.PIPE, text=True, check=True)
expected = json.loads(done.stdout.splitlines()[-1])
completions = f"{url}/v1/completions"
model = LocalCompletionsAPI(
    model="smollm2", base_url=completions, tokenizer_backend="remote", batch_size=4, num_concurrent=1
)
for known, (loglikelihood, _) in zip(expected, ask(), strict=True):
    assert abs(known - loglikelihood) < 1e-3, (known, loglikelihood)
before = prefix_tokens()
again = ask()
cached, computed = (after - then for after, then in zip(prefix_tokens(), before, strict=True))
assert cached / (cached + computed) >= 0.9, f"only {cached} of {cached + computed} tokens came from the cache"
assert all(abs(known - found) < 1e-3 for known, (found, _) in zip(expected, again, strict=True))
