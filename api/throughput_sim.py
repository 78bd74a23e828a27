"""A trace of requests against an engine: Poisson arrivals, real steps, and a clock that skips idle time."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from ramet.api.request_lengths import SHAREGPT, LengthModel
from ramet.engine.admission import Reserve, reservation_gate
from ramet.engine.llm import LLM
from ramet.engine.runs import Generation
from ramet.engine.sampling_params import SamplingParams

MAX_LEN = 256
LENGTHS = LengthModel("sharegpt/8", SHAREGPT.mean_prompt / 8, SHAREGPT.mean_output / 8, MAX_LEN)

Step = Callable[[], float]  # runs one step, returns the seconds that it took


@dataclass(frozen=True)
class Arrival:
    after: float  # units of 1 / rate since the start
    prompt: list[int]
    num_output: int


@dataclass(frozen=True)
class Served:
    """What a trace at one rate gave."""

    rate: float  # requests a second that were offered
    latency: float  # mean of (end - arrival) / output tokens, seconds
    tokens_per_s: float  # output tokens, from the first arrival to the last end
    mean_running: float  # requests in a step
    num_preemptions: int


def trace(num_requests: int, seed: int, vocab_size: int) -> list[Arrival]:
    """The same requests in the same order for every policy and rate."""
    rng = random.Random(seed)
    at, arrivals = 0.0, []
    for request in islice(LENGTHS.requests(seed), num_requests):
        prompt = [rng.randrange(vocab_size) for _ in range(request.num_prompt)]
        arrivals.append(Arrival(at, prompt, request.num_output))
        at += rng.expovariate(1.0)
    return arrivals


def timed(llm: LLM) -> Step:
    """A real step, and how long it took."""

    def step() -> float:
        start = time.perf_counter()
        llm.engine.step()
        return time.perf_counter() - start

    return step


def serve(llm: LLM, arrivals: list[Arrival], reserve: Reserve, rate: float, step: Step) -> Served:
    """Run the whole trace at `rate` requests a second."""
    engine, config = llm.engine, llm.config
    num_slots = config.num_blocks * config.block_size
    engine.scheduler.gate = reservation_gate(reserve, num_slots, config.max_model_len)
    preemptions = engine.scheduler.num_preemptions
    waiting = deque(arrivals)
    running: dict[Generation, Arrival] = {}
    latencies, busy, clock = [], [], 0.0
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0].after / rate)  # nothing to do: the time passes by itself
        while waiting and waiting[0].after / rate <= clock:
            arrival = waiting.popleft()
            running[_submit(llm, arrival)] = arrival
        clock += step()
        busy.append(len(engine.scheduler.running))
        for generation in [one for one in running if one.finished]:
            arrival = running.pop(generation)
            latencies.append((clock - arrival.after / rate) / arrival.num_output)
    engine.scheduler.gate = None
    return Served(
        rate,
        fmean(latencies),
        sum(arrival.num_output for arrival in arrivals) / clock,
        fmean(busy),
        engine.scheduler.num_preemptions - preemptions,
    )


def _submit(llm: LLM, arrival: Arrival) -> Generation:
    params = SamplingParams(max_tokens=arrival.num_output, temperature=1.0, ignore_eos=True)
    # Not cached: no request may profit from an earlier run of the same trace.
    sequence = llm.engine.new_sequence(list(arrival.prompt), keep=False, cache=False)
    generation = llm.engine.generations(sequence, params)[0]
    llm.engine.submit(sequence, generation)
    return generation
