"""What Prometheus is told. No label holds what a client sent, and none names a tenant: series never grow.

Counters and latencies are kept here while requests come and go; what the engine holds is looked at when
somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.engine import Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Names that dashboards for vLLM ask for, and what they are here.
_VLLM = {
    "vllm:num_requests_running": "ramet_sequences_running",
    "vllm:num_requests_waiting": "ramet_sequences_waiting",
    "vllm:kv_cache_usage_perc": "ramet_kv_usage",
    "vllm:num_preemptions": "ramet_preemptions",
    "vllm:prompt_tokens": "ramet_prompt_tokens",
    "vllm:generation_tokens": "ramet_generation_tokens",
    "vllm:prefix_cache_queries": "ramet_prompt_tokens",
    "vllm:prefix_cache_hits": "ramet_prefix_hit_tokens",
    "vllm:time_to_first_token_seconds": "ramet_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "ramet_inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "ramet_request_seconds",
}


@dataclass(frozen=True)
class Look:
    """The engine and the branches at one moment."""

    stats: Stats
    pinned_blocks: int
    leased_blocks: int  # that are not pinned as well
    branches: dict[str, int]  # by state
    num_trees: int


class Metrics:
    """All of a server's metrics."""

    def __init__(self, model_name: str, *, vllm_names: bool = False) -> None:
        self._registry = registry = CollectorRegistry()
        self._engine = _Engine()
        registry.register(self._engine)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"ramet_{name}", help, labels, registry=registry)

        def seconds(name: str, help: str) -> Histogram:
            return Histogram(f"ramet_{name}_seconds", help, ["endpoint"], registry=registry, buckets=_SECONDS)

        self._requests = counter("requests", "Answered requests.", "endpoint", "status")
        self._request_time = seconds("request", "From the first byte in to the last byte out.")
        self._first_token = seconds("time_to_first_token", "Of streams.")
        self._between_tokens = seconds("inter_token_latency", "Of streams, a token.")
        self._cancelled = counter("cancelled", "Requests that were ended early.", "cause")
        self.forks = counter("forks", "Branches that were forked off others.")
        self.prunes = counter("prunes", "Branches that were let go of.", "reason")
        self._beam_searches = counter("beam_searches", "Beam searches that were begun.")
        self._beams = counter("beams", "Beams of these searches: the sum of their widths.")
        self.score_candidates = counter("score_candidates", "Continuations that were scored.")
        for cause in ("disconnect", "request"):
            self._cancelled.labels(cause)
        for reason in ("explicit", "promote", "expired", "abandoned"):
            self.prunes.labels(reason)
        self._vllm = _Renamed(registry, _VLLM, model_name) if vllm_names else None

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """A request has had its answer, or its client has gone (499)."""
        self._requests.labels(endpoint, f"{status // 100}xx").inc()
        self._request_time.labels(endpoint).observe(seconds)
        if status == 499:
            self._cancelled.labels("disconnect").inc()

    def cancelled(self, count: int) -> None:
        self._cancelled.labels("request").inc(count)

    def beams(self, params: BeamSearchParams, num_searches: int = 1) -> None:
        """So many searches begin."""
        self._beam_searches.inc(num_searches)
        self._beams.inc(num_searches * params.num_beams)

    def timer(self, endpoint: str) -> Timer:
        return Timer(self._first_token.labels(endpoint), self._between_tokens.labels(endpoint))

    def text(self, look: Look) -> bytes:
        """Prometheus' text format."""
        self._engine.look = look
        own: bytes = generate_latest(self._registry)
        return own if self._vllm is None else own + generate_latest(self._vllm)


class Timer:
    """When the tokens of one stream came."""

    def __init__(self, first: Histogram, between: Histogram) -> None:
        self._first = first
        self._between = between
        self._last = time.perf_counter()
        self._begun = False

    def tokens(self, count: int) -> None:
        """So many tokens of one choice came now."""
        if count == 0:
            return
        now = time.perf_counter()
        if not self._begun:
            self._begun = True
            self._first.observe(now - self._last)
        else:
            self._between.observe((now - self._last) / count)
        self._last = now


class _Engine(Collector):
    """What was seen at the last look."""

    look: Look | None = None

    def collect(self) -> Iterator[Metric]:
        if self.look is None:
            return
        look, stats, pages = self.look, self.look.stats, self.look.stats.pages
        held = look.pinned_blocks + look.leased_blocks
        yield _by_label(
            "kv_blocks",
            "Blocks of the pool.",
            "state",
            {
                "active": max(0, pages.num_in_use - held),
                "leased": look.leased_blocks,
                "pinned": look.pinned_blocks,
                "evictable": pages.num_cached_idle,
                "free": pages.num_free,
            },
        )
        yield _by_label("branches", "Branches that clients hold.", "state", look.branches)
        gauges: Sequence[tuple[str, str, float]] = (
            ("kv_tokens", "Tokens with KV, each once.", pages.physical_tokens),
            (
                "kv_block_tokens",
                "Tokens that the blocks in use have room for.",
                pages.num_in_use * pages.block_size,
            ),
            ("kv_logical_tokens", "Tokens with KV if nothing were shared.", pages.logical_tokens),
            ("kv_sharing_ratio", "Logical over physical tokens.", pages.sharing_ratio),
            ("kv_usage", "The part of the blocks that is in use.", pages.num_in_use / pages.num_blocks),
            ("sequences_running", "Sequences in the batch.", stats.num_running),
            ("sequences_waiting", "Sequences in the queue.", stats.num_waiting),
            ("trees", "Trees that clients hold.", look.num_trees),
        )
        for name, help, value in gauges:
            yield GaugeMetricFamily(f"ramet_{name}", help, value=value)
        cached, prompt = stats.num_cached_tokens, stats.num_prompt_tokens
        sources = {"cached": cached, "computed": prompt - cached}
        yield _by_label(
            "prefix_tokens", "Prompt tokens by where they came from.", "source", sources, count=True
        )
        counters = (
            ("prompt_tokens", "Prompt tokens of admitted requests, each once.", prompt),
            ("prefix_hit_tokens", "Those found in the cache.", cached),
            ("generation_tokens", "Tokens generated.", stats.num_generated_tokens),
            ("steps", "Steps of the engine.", stats.num_steps),
            ("preemptions", "Running sequences that gave up their blocks.", stats.num_preemptions),
            ("parked", "Idle branches that gave up their blocks.", stats.num_parked_idle),
            ("cow_copies", "Blocks copied on write.", pages.num_copies),
            ("evicted_blocks", "Cached blocks that were evicted.", pages.num_evicted),
        )
        for name, help, value in counters:
            yield CounterMetricFamily(f"ramet_{name}", help, value=value)


def _by_label(
    name: str, help: str, label: str, values: dict[str, int], *, count: bool = False
) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if count else GaugeMetricFamily
    family = kind(f"ramet_{name}", help, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


class _Renamed(Collector):
    """The same numbers under the names of others."""

    def __init__(self, registry: CollectorRegistry, names: dict[str, str], model_name: str) -> None:
        self._registry = registry
        self._names = names
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        families = {family.name: family for family in self._registry.collect()}
        for name, source in self._names.items():
            family = families[source]
            renamed = Metric(name, family.documentation, family.type)
            for sample in family.samples:
                labels = {"model_name": self._model_name, **sample.labels}
                renamed.add_sample(name + sample.name.removeprefix(source), labels, sample.value)
            yield renamed
