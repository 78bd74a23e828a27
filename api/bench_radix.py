"""`ramet bench radix`: what the bookkeeping of branches costs on the host, and what two other designs cost.

Microseconds of wall clock. One sample is one pair of clock reads (some 80 ns with the call; not subtracted)
around a call of the work; work that is about as short as that is done some times a sample and divided, which
its p99 then averages over. Automatic garbage collection is off while the clock runs. Bytes are tracemalloc's.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ramet.api.bench import Report
from ramet.api.radix_baselines import HashChain, HeapNode, HeapTree
from ramet.radix.accounting import depth_first
from ramet.radix.block_pool import BlockPool
from ramet.radix.cursor import Cursor
from ramet.radix.prefix_cache import PrefixCache
from ramet.radix.tokens import TOKEN_BYTES, pack

BLOCK = 16
SYSTEM = tuple(range(64))  # a prefix that everybody shares
GROUP = 8  # forks, or evictions, in a sample
Metrics = dict[str, float]


class Times(NamedTuple):
    """Microseconds of one operation."""

    p50: float
    p99: float


class Bound(NamedTuple):
    """One row of the table of targets: the metric may be at most this."""

    metric: str
    most: float


TARGETS = (
    Bound("fork_64_us_p50", 2),
    Bound("fork_64k_us_p50", 2),
    Bound("fork_64k_over_64", 1.5),
    Bound("fork_at_split_us_p50", 20),
    Bound("match_8192_1_nodes_us_p50", 15),
    Bound("match_8192_8_nodes_us_p50", 15),
    Bound("match_us_per_node_beyond", 0.6),
    Bound("partial_match_10k_us_p50", 15),
    Bound("take_return_us", 0.5),
    Bound("publish_us_p50", 8),
    Bound("publish_new_child_us_p50", 8),
    Bound("step_1_row_us_p50", 2),
    Bound("step_256_rows_us_per_row", 2),
    Bound("truncate_us_p50", 4),
    Bound("evict_500_us_p50", 5),
    Bound("evict_50k_us_p50", 5),
    Bound("evict_50k_over_500", 1.5),
    Bound("evict_50k_us_p99", 20),
    Bound("cycle_50k_us_p50", 25),
    Bound("depth_first_256_us_p50", 200),
    Bound("idle_branch_bytes", 3 * 1024),
    Bound("bytes_per_token_128", 16),
    Bound("bytes_per_token_32", 56),
    Bound("bytes_per_token_16", 56),
)


def run(progress: Progress | None = None) -> Report:
    """Measure every row; about a minute. Without `progress`, a bar is drawn on stderr."""
    report = Report("radix")
    with _shown(progress) as shown:
        task = shown.add_task("", total=len(ROWS))
        for measure in ROWS:
            name = measure.__name__.strip("_").replace("_", " ")
            shown.update(task, description=name)
            report.metrics |= measure()
            shown.advance(task)
    for metric, most in TARGETS:
        report.target(metric, "<=", most)
    report.tables.append(_table(report.metrics))
    return report


# -- the clock -------------------------------------------------------------------------------------


def timed(
    work: Callable[[Any], Any],
    arguments: Iterable[Any],
    after: Callable[[Any], object] = lambda _: None,
    group: int = 1,
) -> list[float]:
    """Microseconds of each call of `work`, divided by `group`. `after` gets its result, off the clock."""
    times = []
    with _no_garbage_collection():
        for argument in arguments:
            start = perf_counter_ns()
            result = work(argument)
            times.append((perf_counter_ns() - start) / 1000 / group)
            after(result)
    return times


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def quantiles(times: list[float]) -> Times:
    ordered = sorted(times)
    return Times(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100])


def _named(name: str, times: list[float]) -> Metrics:
    p50, p99 = quantiles(times)
    return {f"{name}_us_p50": p50, f"{name}_us_p99": p99}


# -- building blocks -------------------------------------------------------------------------------


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(50_000), k=count))


def _write(cursor: Cursor, tokens: bytes) -> None:
    """One step of one row, as an engine does it, the device aside."""
    cache = cursor.cache
    (reservation,) = cache.reserve([(cursor, len(tokens) // TOKEN_BYTES)])
    cache.take_copies()
    cache.copies_done()
    cache.commit(reservation, tokens)


def _prompt(cache: PrefixCache, tokens: bytes) -> Cursor:
    cursor = cache.attach("bench", tokens)
    if cursor.length < len(tokens) // TOKEN_BYTES:
        _write(cursor, tokens[cursor.length * TOKEN_BYTES :])
    return cursor


def _release(cursor: Cursor) -> None:
    cursor.release()


def _with_leaves(rng: random.Random, num_leaves: int, spare: int = 0) -> PrefixCache:
    """A full pool: so many idle one-block leaves below an idle prefix of four blocks, `spare` blocks free."""
    cache = PrefixCache(num_leaves + len(SYSTEM) // BLOCK + spare, BLOCK)
    for _ in range(num_leaves):
        _prompt(cache, pack(SYSTEM + _ids(rng, BLOCK))).release()
    return cache


# -- the rows: fork, match -------------------------------------------------------------------------


def _fork() -> Metrics:
    """With an open tail; both lengths in turns, so that they share the machine's moods."""
    rng = random.Random(1)
    branches: dict[str, Cursor] = {}
    tables: dict[str, tuple[HashChain, list[int]]] = {}
    trees: dict[str, tuple[HeapTree, HeapNode]] = {}
    for name, length in (("fork_64", 64), ("fork_64k", 65_536)):
        ids = _ids(rng, length + 8)
        branches[name] = _prompt(PrefixCache(length // BLOCK + 2, BLOCK), pack(ids))
        chain, tree = HashChain(length // BLOCK, BLOCK), HeapTree(length // BLOCK, BLOCK)
        tables[name] = chain, chain.insert(ids)
        trees[name] = tree, tree.insert(ids)
    times: dict[str, list[float]] = {name: [] for name in branches}
    for _ in range(5):
        for name, branch in branches.items():
            times[name] += timed(_fork_group, [branch] * 1_000, _release_all, GROUP)
    found = _named("fork_64", times["fork_64"]) | _named("fork_64k", times["fork_64k"])
    found["fork_64k_over_64"] = found["fork_64k_us_p50"] / found["fork_64_us_p50"]
    chain, table = tables["fork_64k"]
    found |= _named("hash_chain_fork_64k", timed(chain.fork, [table] * 200, chain.release))
    tree, node = trees["fork_64k"]
    row = list(range(65_536 // BLOCK))

    def fork(node: HeapNode) -> list[int]:
        tree.lock(node)
        return list(row)

    times_b = timed(fork, [node] * 500, lambda _: tree.unlock(node))
    return found | _named("heap_tree_fork_64k", times_b)


def _fork_group(parent: Cursor) -> list[Cursor]:
    return [parent.fork() for _ in range(GROUP)]


def _release_all(children: list[Cursor]) -> None:
    for child in children:
        child.release()


def _fork_at_a_split() -> Metrics:
    """Each fork cuts a whole 64k node; off the clock the halves are joined again."""
    rng = random.Random(2)
    branch = _prompt(PrefixCache(65_536 // BLOCK + 1, BLOCK), pack(_ids(rng, 65_536)))

    def join(child: Cursor) -> None:
        child.release()
        branch.cache.tree.join_ancestors(branch.node)

    places = [rng.randrange(1, 65_520) for _ in range(500)]
    return _named("fork_at_split", timed(branch.fork, places, join))


def _match() -> Metrics:
    """A whole hit of 8,192 tokens, and 16 tokens more that nobody has."""
    ids = _ids(random.Random(3), 8_192 + BLOCK)
    tokens = pack(ids)
    found: Metrics = {}
    for num_nodes in (1, 8, 64, 512):
        cache = PrefixCache(8_192 // BLOCK, BLOCK)
        piece = 8_192 // num_nodes
        held = []  # a branch at each border, so that the next piece becomes a node of its own
        for end in range(piece, 8_192 + 1, piece):
            held.append(_prompt(cache, tokens[: end * TOKEN_BYTES]))
        match = cache.tree.match
        times = timed(lambda _: match("bench", tokens), range(2_000))  # noqa: B023
        assert match("bench", tokens).length == 8_192
        found |= _named(f"match_8192_{num_nodes}_nodes", times)
    beyond = found["match_8192_512_nodes_us_p50"] - found["match_8192_8_nodes_us_p50"]
    found["match_us_per_node_beyond"] = beyond / (512 - 8)
    found |= _named("pack_8192", timed(pack, [list(ids)] * 500))
    return found | _match_baselines(ids)


def _match_baselines(ids: tuple[int, ...]) -> Metrics:
    chain, tree = HashChain(512, BLOCK), HeapTree(512, BLOCK)
    chain.insert(ids[:8_192])
    for end in range(1_024, 8_193, 1_024):
        tree.insert(ids[:end])
    hashes = chain.hashes(ids)
    return {
        **_named("hash_chain_match_8192", timed(chain.match_length, [ids] * 200)),
        **_named("hash_chain_look_up_8192", timed(chain.match, [hashes] * 1_000)),
        **_named("heap_tree_match_8192", timed(tree.match, [ids] * 200)),
    }


def _partial_match() -> Metrics:
    """The prompt leaves one of 10,000 siblings in the middle of its block."""
    rng = random.Random(4)
    cache = PrefixCache(10_000, BLOCK)
    children = [_ids(rng, BLOCK) for _ in range(10_000)]
    for ids in children:
        _prompt(cache, pack(ids)).release()
    prompts = [pack(ids[:8] + _ids(rng, BLOCK)) for ids in rng.sample(children, 2_000)]
    times = timed(lambda prompt: cache.tree.match("bench", prompt), prompts)
    assert all(cache.tree.match("bench", prompt).length >= 8 for prompt in prompts)
    return _named("partial_match_10k", times)


# -- the rows: writing -----------------------------------------------------------------------------


def _take_and_return() -> Metrics:
    pool = BlockPool(4_096)

    def work(count: int) -> None:
        take, drop = pool.take, pool.drop
        for block in [take() for _ in range(count)]:
            drop(block)

    p50, p99 = quantiles(timed(work, [1_000] * 500, group=1_000))
    return {"take_return_us": p50, "take_return_us_p99": p99}


def _publish() -> Metrics:
    """Append 16 tokens, the whole step: reserve, copies, commit. The branch grows from 8k to 40k tokens."""
    rng = random.Random(5)
    ids = _ids(rng, 8_192)
    branch = _prompt(PrefixCache(4_096, BLOCK), pack(ids))
    pieces = [pack(_ids(rng, BLOCK)) for _ in range(2_000)]
    found = _named("publish", timed(lambda piece: _write(branch, piece), pieces))
    chain, tree = HashChain(4_096, BLOCK), HeapTree(4_096, BLOCK)
    blocks = [_ids(rng, BLOCK) for _ in range(2_000)]
    chained = timed(lambda ids: chain.publish(chain.take(), 1, ids), blocks)
    grown = [ids + _ids(rng, BLOCK) for _ in range(200)]
    node = tree.insert(ids)
    tree.lock(node)

    def insert(grown: tuple[int, ...]) -> Any:
        return tree.publish(node, grown)

    def back(target: Any) -> None:
        tree.unlock(target)
        tree.lock(node)

    found |= _named("hash_chain_publish", chained)
    return found | _named("heap_tree_publish", timed(insert, grown, back))


def _publish_a_new_child() -> Metrics:
    rng = random.Random(6)
    cache = _with_leaves(rng, 20_000, spare=2_000)
    parent = cache.attach("bench", pack(SYSTEM))
    pieces = [(parent.fork(), pack(_ids(rng, BLOCK))) for _ in range(2_000)]
    return _named("publish_new_child", timed(lambda pair: _write(*pair), pieces))


def _step_of_one_token() -> Metrics:
    found: Metrics = {}
    for name, num_rows in (("step_1_row", 1), ("step_256_rows", 256)):
        rng = random.Random(7)
        num_steps = 4_000 if num_rows == 1 else 320
        cache = PrefixCache(num_rows * (num_steps // BLOCK + 2) + 8, BLOCK)
        rows = [_prompt(cache, pack(SYSTEM + _ids(rng, 8))) for _ in range(num_rows)]
        for row in rows:
            row.keep_row()
        writes = [(row, 1) for row in rows]
        steps = [[pack(_ids(rng, 1)) for _ in rows] for _ in range(num_steps)]
        found |= _named(name, timed(lambda tokens: _step(cache, writes, tokens), steps))  # noqa: B023
    for quantile in ("p50", "p99"):
        found[f"step_256_rows_us_per_row_{quantile}"] = found[f"step_256_rows_us_{quantile}"] / 256
    found["step_256_rows_us_per_row"] = found["step_256_rows_us_per_row_p50"]
    return found


def _step(cache: PrefixCache, writes: list[tuple[Cursor, int]], tokens: list[bytes]) -> None:
    """One token for each row, the device aside."""
    reservations = cache.reserve(writes)
    if cache.copies:
        cache.copies_done()
    for reservation, token in zip(reservations, tokens, strict=True):
        cache.commit(reservation, token)


def _truncate() -> Metrics:
    """From 64k tokens by 1 to 40; off the clock the branch writes them again."""
    rng = random.Random(8)
    tokens = pack(_ids(rng, 65_536))
    branch = _prompt(PrefixCache(65_536 // BLOCK + 8, BLOCK), tokens)
    places = [65_536 - rng.randint(1, 40) for _ in range(2_000)]
    return _named(
        "truncate",
        timed(branch.truncate, places, lambda _: _write(branch, tokens[branch.length * TOKEN_BYTES :])),
    )


# -- the rows: eviction ----------------------------------------------------------------------------


def _evict() -> Metrics:
    """One block from a full pool; off the clock a new leaf takes its place. Both sizes in turns.

    So each call is the first after other work. `in_a_row` is eight calls, as a step of 128 rows needs them.
    """
    rng = random.Random(9)
    caches = {name: _with_leaves(rng, n) for name, n in (("evict_500", 500), ("evict_50k", 50_000))}
    times: dict[str, list[float]] = {}

    def refill(cache: PrefixCache) -> None:
        for _ in range(cache.pool.num_free):
            _prompt(cache, pack(SYSTEM + _ids(rng, BLOCK))).release()

    for _ in range(5):
        for name, cache in caches.items():
            for kind, group in (("", 1), ("_in_a_row", GROUP)):
                samples = timed(_evict_group, [(cache, group)] * 500, refill, group)
                times.setdefault(name + kind, []).extend(samples)
    found: Metrics = {}
    for name, samples in times.items():
        found |= _named(name, samples)
    found["evict_50k_over_500"] = found["evict_50k_us_p50"] / found["evict_500_us_p50"]
    return found | _evict_baselines(rng)


def _evict_group(work: tuple[PrefixCache, int]) -> PrefixCache:
    cache, group = work
    evict = cache.tree.evict
    for _ in range(group):
        evict(1)
    return cache


def _evict_baselines(rng: random.Random) -> Metrics:
    """The same on the other designs, one call a sample."""
    found: Metrics = {}
    for name, num_leaves, samples in (("500", 500, 1_000), ("50k", 50_000, 30)):
        leaves = [SYSTEM + _ids(rng, BLOCK) for _ in range(num_leaves)]
        chain, tree = HashChain(num_leaves + 4, BLOCK), HeapTree(num_leaves + 4, BLOCK)
        for ids in leaves:
            chain.release(chain.insert(ids))
            tree.insert(ids)
        found |= _named(f"hash_chain_evict_{name}", _evict_chain(chain, rng))
        found |= _named(f"heap_tree_evict_{name}", _evict_heap(tree, rng, samples))
    return found


def _evict_chain(chain: HashChain, rng: random.Random) -> list[float]:
    def refill(block: int) -> None:
        chain.publish(block, 1, _ids(rng, BLOCK))
        chain.release([block])

    return timed(lambda _: chain.take(), range(1_000), refill)


def _evict_heap(tree: HeapTree, rng: random.Random, samples: int) -> list[float]:
    return timed(tree.evict, [1] * samples, lambda _: tree.insert(SYSTEM + _ids(rng, BLOCK)))


def _cycle() -> Metrics:
    """Fork, evict two blocks, publish two, release, with 50,000 idle leaves."""
    rng = random.Random(10)
    cache = _with_leaves(rng, 50_000)
    parent = cache.attach("bench", pack(SYSTEM))

    def work(tokens: bytes) -> None:
        child = parent.fork()
        _write(child, tokens)
        child.release()

    return _named("cycle_50k", timed(work, [pack(_ids(rng, 2 * BLOCK)) for _ in range(3_000)]))


def _depth_first() -> Metrics:
    """256 rows, each forked from a random one before it and grown by a block; rebuilt from nothing."""
    rng = random.Random(11)
    cache = PrefixCache(600, BLOCK)
    rows = [_prompt(cache, pack(SYSTEM))]
    while len(rows) < 256:
        rows.append(rng.choice(rows).fork())
        _write(rows[-1], pack(_ids(rng, BLOCK)))
    rng.shuffle(rows)
    return _named("depth_first_256", timed(lambda rows: depth_first(rows, BLOCK), [rows] * 300))


# -- the rows: memory ------------------------------------------------------------------------------


def _idle_branches() -> Metrics:
    """10,000 branches of 200 own tokens on 8,192 shared ones. The pool's own lists are counted in."""
    rng = random.Random(12)
    owned = [pack(_ids(rng, 200)) for _ in range(10_000)]
    with _traced() as traced:
        cache = PrefixCache(8_192 // BLOCK + 10_000 * 13, BLOCK)
        parent = _prompt(cache, pack(_ids(rng, 8_192)))
        branches = [parent.fork() for _ in owned]
        for branch, tokens in zip(branches, owned, strict=True):
            _write(branch, tokens)
    return {"idle_branch_bytes": traced[0] / len(owned)}


def _bytes_per_token() -> Metrics:
    """Idle nodes of 128, 32 and 16 tokens, siblings below one prefix. The pool's own lists are counted in."""
    found: Metrics = {}
    for length in (128, 32, 16):
        rng = random.Random(13)
        num_nodes = 256_000 // length
        prompts = [pack(SYSTEM + _ids(rng, length)) for _ in range(num_nodes)]
        num_blocks = 4 + num_nodes * length // BLOCK
        with _traced() as traced:
            pool = BlockPool(num_blocks)
        found["pool_bytes_per_token"] = traced[0] / num_blocks / BLOCK
        del pool
        with _traced() as traced:
            cache = PrefixCache(num_blocks, BLOCK)
            for prompt in prompts:
                _prompt(cache, prompt).release()
        found[f"bytes_per_token_{length}"] = traced[0] / cache.num_cached / BLOCK
    return found


@contextmanager
def _traced() -> Iterator[list[int]]:
    """The bytes that are allocated inside and still there at its end."""
    size: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        yield size
        gc.collect()
        size.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


ROWS: tuple[Callable[[], Metrics], ...] = (
    _fork,
    _fork_at_a_split,
    _match,
    _partial_match,
    _take_and_return,
    _publish,
    _publish_a_new_child,
    _step_of_one_token,
    _truncate,
    _evict,
    _cycle,
    _depth_first,
    _idle_branches,
    _bytes_per_token,
)


# -- for people ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table; the baselines' metrics are named after theirs, if they have the operation."""

    title: str
    metric: str
    baseline: str = ""


TABLE = (
    Row("fork at 64 tokens", "fork_64"),
    Row("fork at 64k tokens", "fork_64k", "fork_64k"),
    Row("first fork(at) in a 64k path", "fork_at_split"),
    Row("match 8,192 tokens over 1 node", "match_8192_1_nodes"),
    Row("match 8,192 tokens over 8 nodes", "match_8192_8_nodes", "match_8192"),
    Row("match 8,192 tokens over 64 nodes", "match_8192_64_nodes"),
    Row("match 8,192 tokens over 512 nodes", "match_8192_512_nodes"),
    Row("pack or hash a prompt, once a request", "pack_8192"),
    Row("partial match below 10,000 children", "partial_match_10k"),
    Row("append 16 and publish, grow", "publish", "publish"),
    Row("append 16 and publish, new child", "publish_new_child"),
    Row("one-token step, 1 row", "step_1_row"),
    Row("one-token step, 256 rows, a row", "step_256_rows_us_per_row"),
    Row("truncate 64k by 1..40", "truncate"),
    Row("evict a block, 500 leaves", "evict_500", "evict_500"),
    Row("evict a block, 50,000 leaves", "evict_50k", "evict_50k"),
    Row("evict a block of eight in a row", "evict_50k_in_a_row"),
    Row("fork + 2 evict + publish 2 + release", "cycle_50k"),
    Row("depth-first order, 256 rows", "depth_first_256"),
)


def _table(metrics: Metrics) -> Table:
    table = Table(title="Radix tree, microseconds, p50 / p99", title_justify="left")
    for column in ("operation", "ramet", "target p50", "hash chain (a)", "heap a call (b)"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    most = {bound.metric: f"<= {bound.most:g}" for bound in TARGETS}
    for title, metric, baseline in TABLE:
        asked = most.get(f"{metric}_us_p50", most.get(metric, ""))
        table.add_row(
            title,
            _cell(metrics, metric),
            asked,
            _cell(metrics, f"hash_chain_{baseline}"),
            _cell(metrics, f"heap_tree_{baseline}"),
        )
    table.caption = (
        "(a) as in vLLM: a dict of chained block hashes; the match hashes the prompt first. (b) as in the "
        "classic SGLang: look-ups change the tree, each eviction builds a heap. Both reuse whole blocks only."
    )
    table.caption_justify = "left"
    return table


def _cell(metrics: Metrics, name: str) -> str:
    for stem in (f"{name}_us", name):
        if f"{stem}_p50" in metrics:
            return f"{metrics[f'{stem}_p50']:.3g} / {metrics[f'{stem}_p99']:.3g}"
    return ""


@contextmanager
def _shown(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield shown
