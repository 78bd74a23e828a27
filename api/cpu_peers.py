"""transformers for `ramet bench cpu`: `generate` and continuous batching, on the same weights."""

from __future__ import annotations

import time
from typing import Any

import torch

from ramet.api.cpu_result import Result, Skipped, check_lengths
from ramet.api.workloads import BEAM, Call, Workload, resolve
from ramet.engine.model_files import load_default


class Generate:
    """`model.generate`, one call for a round of equal prompts."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model: Any = load_default(dtype, None).module

    def run(self, workload: Workload) -> Result:
        if len(workload.rounds) > 1 or len({call.prompt_length for call in workload}) > 1:
            raise Skipped("generate keeps nothing from call to call; it runs W1, W2, W5 and W9")
        calls = list(workload.rounds[0])
        prompts = torch.tensor([resolve(call, {}).prompt for call in calls])  # [N, T]
        clock = _FirstToken()
        start = time.perf_counter()
        found = self._generate(prompts, calls[0], clock)
        wall = time.perf_counter() - start
        new = found[:, prompts.shape[1] :].tolist()
        each = calls[0].n
        check_lengths(workload, {c.uid: new[i * each : (i + 1) * each] for i, c in enumerate(calls)})
        ttft = None if clock.at is None else clock.at - start
        # The prompt is repeated before the prefill, for samples and for beams.
        return Result(wall, workload.totals().output_tokens, ttft, prompts.numel() * each)

    @torch.inference_mode()
    def _generate(self, prompts: torch.Tensor, call: Call, clock: _FirstToken) -> torch.Tensor:
        how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        if call.mode == BEAM:
            how = {"do_sample": False, "num_beams": call.n}
        found: torch.Tensor = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=call.max_tokens,
            max_new_tokens=call.max_tokens,
            num_return_sequences=call.n,
            pad_token_id=0,
            logits_processor=[clock],
            **how,
        )
        return found


class _FirstToken:
    """Hears of the first logits, on their way to be sampled from."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.at is None:
            self.at = time.perf_counter()
        return scores


class GenerateBatch:
    """`model.generate_batch`: paged continuous batching, which is made for GPUs and starts on a CPU, too."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model: Any = load_default(dtype, None).module
        if not hasattr(self.model, "generate_batch"):
            raise Skipped("this transformers has no generate_batch")

    def run(self, workload: Workload) -> Result:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        if workload.name not in ("W1", "W2") or len(workload.rounds) > 1:
            raise Skipped("generate_batch is run on W1 and W2")
        calls = list(workload)
        # It returns only the first of several samples, so each sample is a request.
        prompts = [resolve(call, {}).prompt for call in calls for _ in range(call.n)]
        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=calls[0].max_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
        )
        batching: Any = ContinuousBatchingConfig()
        batching.num_blocks, batching.max_batch_tokens = 512, 512
        start = time.perf_counter()
        outputs = self.model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        wall = time.perf_counter() - start
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        if lengths != [calls[0].max_tokens] * len(prompts):
            raise Skipped("generate_batch did not complete its requests on this CPU")
        return Result(wall, workload.totals().output_tokens)
