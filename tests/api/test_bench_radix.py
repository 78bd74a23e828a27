"""The benchmark's names and bounds, and that its baselines find the same prefixes as the tree."""

from __future__ import annotations

import random

import pytest

from ramet.api import bench_radix
from ramet.api.bench import Report
from ramet.api.radix_baselines import HashChain, HeapTree
from ramet.radix.prefix_cache import PrefixCache
from ramet.radix.tokens import pack

SIZE = 4
PROMISED = (
    "fork_64k_us_p50",
    "fork_64k_over_64",
    "match_8192_8_nodes_us_p50",
    "take_return_us",
    "publish_us_p50",
    "publish_new_child_us_p50",
    "evict_50k_us_p50",
    "evict_50k_us_p99",
    "evict_50k_over_500",
    "bytes_per_token_128",
    "idle_branch_bytes",
)


def prompts(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Half of them go on from a part of an earlier one."""
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        shared = rng.choice(made) if made and rng.random() < 0.5 else ()
        shared = shared[: rng.randint(0, len(shared))]
        made.append(shared + tuple(rng.choices(range(2), k=rng.randint(1, 20))))
    return made


@pytest.mark.parametrize("seed", range(5))
def test_the_baselines_find_the_same_whole_blocks(seed: int) -> None:
    rng = random.Random(seed)
    cache, chain, tree = PrefixCache(4_000, SIZE), HashChain(4_000, SIZE), HeapTree(4_000, SIZE)
    for prompt in prompts(rng, 150):
        match = cache.tree.whole_blocks(cache.tree.match("bench", pack(prompt)))
        assert chain.match_length(prompt) == match.length
        assert tree.match_length(prompt) == match.length
        bench_radix._prompt(cache, pack(prompt)).release()
        chain.release(chain.insert(prompt))
        tree.insert(prompt)


@pytest.mark.parametrize("seed", range(5))
def test_the_baselines_keep_their_books(seed: int) -> None:
    """A full pool, so that all of it is evicted and used again."""
    rng = random.Random(seed)
    chain, tree = HashChain(40, SIZE), HeapTree(40, SIZE)
    for prompt in prompts(rng, 200):
        table = chain.insert(prompt[:60])
        assert len(table) == len(set(table)) == len(prompt[:60]) // SIZE
        chain.release(chain.fork(table))
        assert all(chain.ref_counts[block] == 1 for block in table)
        chain.release(table)
        assert len(chain.free) == 40
        node = tree.insert(prompt[:60])
        tree.lock(node)
        tree.unlock(tree.publish(node, prompt[:60]))
        assert tree.match_length(prompt[:60]) == len(prompt[:60]) // SIZE * SIZE
        held = [block for n in tree._nodes() for block in n.blocks]
        assert sorted(held + tree.free) == list(range(40))
        assert all(n.locks == 0 for n in tree._nodes())


def test_every_target_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick rows are measured; the names of the rest are read from what the code holds them against."""
    quick = (bench_radix._take_and_return, bench_radix._depth_first)
    monkeypatch.setattr(bench_radix, "ROWS", quick)
    wanted = [b for b in bench_radix.TARGETS if b.metric in ("take_return_us", "depth_first_256_us_p50")]
    monkeypatch.setattr(bench_radix, "TARGETS", wanted)
    report = bench_radix.run()
    assert isinstance(report, Report)
    assert {target.name for target in report.targets} == {bound.metric for bound in wanted}
    assert all(target.kind == "must" for target in report.targets)
    assert len(report.tables) == 1


def test_promised_names() -> None:
    assert set(PROMISED) <= {bound.metric for bound in bench_radix.TARGETS}


def test_quantiles() -> None:
    assert bench_radix.quantiles([float(i) for i in range(100)][::-1]) == (50.0, 99.0)


def test_timing_divides_by_the_group_and_hands_results_on() -> None:
    seen: list[int] = []
    times = bench_radix.timed(lambda x: x + 1, [1, 2, 3], seen.append, group=1_000)
    assert seen == [2, 3, 4]
    assert all(0 <= time < 1 for time in times)
