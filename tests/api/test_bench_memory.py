"""The memory benchmark: simulations against step-by-step counting, and a whole run on a small setting."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console
from rich.progress import Progress

from ramet.api import bench_memory
from ramet.api.bench import Report
from ramet.api.bench_memory import BLOCK_SIZES, PAPER_SAVING, Settings, run
from ramet.api.contiguous import Buddy, FirstFit
from ramet.api.contiguous_sim import ContiguousSim, Event, Refusal
from ramet.api.paged_replay import replay
from ramet.api.paged_sim import PagedSim
from ramet.api.request_lengths import ALPACA, SHAREGPT, LengthModel, Request
from ramet.radix.prefix_cache import PrefixCache

SMALL = LengthModel("small", mean_prompt=9, mean_output=12, max_model_len=64)
SHORT = Settings(
    warm_up=100,
    contiguous_steps=4_000,
    article_steps=600,
    sweep_steps=200,
    sharing_steps=400,
    num_drawn=2_000,
)


def requests(*lengths: tuple[int, int]) -> Iterator[Request]:
    """Requests of these (prompt, output) lengths, then one after another that no small pool can hold."""
    for index, (num_prompt, num_output) in enumerate(lengths):
        yield Request(index, num_prompt, num_output, capped=False)
    while True:
        yield Request(-1, 10**9, 1, capped=True)


# -- lengths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [SHAREGPT, ALPACA])
def test_lengths_have_the_means_of_the_paper_before_the_cut(model: LengthModel) -> None:
    uncut = LengthModel(model.name, model.mean_prompt, model.mean_output, max_model_len=10**9)
    drawn = list(islice(uncut.requests(0), 20_000))
    # Four standard errors: the standard deviation of a lognormal is its mean times sqrt(exp(sigma^2) - 1).
    tolerance = 4 * math.sqrt((math.e - 1) / len(drawn))
    assert sum(r.num_prompt for r in drawn) / len(drawn) == pytest.approx(model.mean_prompt, rel=tolerance)
    assert sum(r.num_output for r in drawn) / len(drawn) == pytest.approx(model.mean_output, rel=tolerance)
    assert not any(r.capped for r in drawn)


@given(seed=st.integers(0, 1000))
def test_no_request_is_longer_than_the_model_allows(seed: int) -> None:
    for request in islice(SMALL.requests(seed), 100):
        total = request.num_prompt + request.num_output
        assert min(request.num_prompt, request.num_output) >= 1
        assert total <= SMALL.max_model_len
        assert not request.capped or total == SMALL.max_model_len


def test_a_seed_is_a_trace() -> None:
    first, again, other = (list(islice(SHAREGPT.requests(seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


# -- contiguous ----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), exact=st.booleans(), buddy=st.booleans(), warm_up=st.integers(0, 40))
def test_jumping_between_events_counts_like_going_step_by_step(
    seed: int, exact: bool, buddy: bool, warm_up: int
) -> None:
    def make() -> FirstFit | Buddy:
        return Buddy(300) if buddy else FirstFit(300)

    def size_of(request: Request) -> int:
        return request.num_kv if exact else SMALL.max_model_len

    result = ContiguousSim(make(), size_of, SMALL.requests(seed)).run(200, warm_up)

    pool, queue, live = make(), SMALL.requests(seed), list[tuple[int, int, Request]]()
    head = next(queue)
    used = reservation = internal = external = resident = fragmented = 0
    for now in range(200):
        for entered_at, start, request in list(live):
            if now == entered_at + request.num_output:
                pool.free(start)
                live.remove((entered_at, start, request))
        while (place := pool.allocate(size_of(head))) is not None:
            live.append((now, place, head))
            head = next(queue)
        if now < warm_up:
            continue
        for entered_at, start, request in live:
            tokens = request.num_prompt + now - entered_at
            used += tokens
            reservation += request.num_kv - tokens
            internal += pool.taken(start) - request.num_kv
        external += pool.num_free
        resident += len(live)
        fragmented += pool.num_free >= size_of(head)

    counted = 200 - warm_up
    slots = 300 * counted
    expected = (used / slots, reservation / slots, internal / slots, external / slots, 0.0)
    assert tuple(result.shares) == pytest.approx(expected)
    assert sum(result.shares) == pytest.approx(1)
    assert result.num_resident == pytest.approx(resident / counted)
    assert result.refused_by_fragmentation == pytest.approx(fragmented / counted)


def test_a_refusal_although_enough_is_free_and_its_paged_replay() -> None:
    # Four ranges of 16 fill the pool. The first and third leave at step 2: two holes of 16, no room for 32.
    trace = [(15, 2), (7, 10), (15, 2), (7, 10), (30, 3)]
    sim = ContiguousSim(FirstFit(64), lambda request: request.num_kv, requests(*trace))
    sim.run(steps=3, warm_up=0)
    refusal = sim.refusals[-1]
    assert refusal.request.index == 4
    assert (refusal.size, refusal.num_free, refusal.largest_hole) == (32, 32, 16)
    assert (refusal.num_resident, refusal.at) == (2, 2)

    replayed = replay(PrefixCache(4, block_size=16), sim.events, refusal)
    assert (replayed.admitted, replayed.num_needed, replayed.num_free) == (True, 2, 2)


def test_a_replay_says_when_paging_refuses_too() -> None:
    resident, refused = Request(0, 16, 1, capped=False), Request(1, 48, 1, capped=False)
    refusal = Refusal(refused, 48, num_free=48, largest_hole=16, num_resident=1, at=0, num_events=1)
    replayed = replay(PrefixCache(3, block_size=16), [Event("enter", 0, resident)], refusal)
    assert (replayed.admitted, replayed.num_needed, replayed.num_free) == (False, 3, 2)


# -- paged ---------------------------------------------------------------------------------------------


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_blocks_of_the_real_tree_are_the_arithmetic(block_size: int, n: int) -> None:
    """One request at a time, whole requests: live blocks, step by step, with and without sharing."""
    trace = list(islice(SMALL.requests(1), 12))
    shared = unshared = unfilled = 0
    open_slots: list[int] = []  # of each sequence that the cut did not end, at each step
    for request in trace:
        for age in range(request.num_output):
            tokens = request.num_prompt + age
            # Until the first write, all samples are on the prompt's blocks, the open one included.
            common = ceil_div(tokens, block_size) if age == 0 else request.num_prompt // block_size
            unshared += n * ceil_div(tokens, block_size)
            shared += n * ceil_div(tokens, block_size) - (n - 1) * common
            unfilled += n * (ceil_div(tokens, block_size) * block_size - tokens)
            if not request.capped:
                open_slots.append(ceil_div(tokens, block_size) * block_size - tokens)
    steps = sum(request.num_output for request in trace)

    cache = PrefixCache(512, block_size=block_size)
    sim = PagedSim(cache, SMALL.requests(1), n, max_resident=1)
    result = sim.run(steps, warm_up=0)
    assert (result.num_finished, result.num_preempted) == (len(trace), 0)
    assert result.num_resident == 1
    assert result.saved_by_sharing == pytest.approx(1 - shared / unshared)
    assert result.blocks_per_sequence == pytest.approx(unshared / (n * steps))
    assert result.waste_per_sequence == pytest.approx(sum(open_slots) / len(open_slots))
    if n == 1:
        assert result.waste == pytest.approx(unfilled / (unshared * block_size))
        assert result.shares.free == pytest.approx(1 - unshared / (512 * steps))
    sim.close()
    assert cache.pool.num_free == 512


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), n=st.sampled_from([1, 3]), block_size=st.sampled_from([2, 4, 16]))
def test_a_dry_pool_preempts_and_loses_no_block(seed: int, n: int, block_size: int) -> None:
    # Barely room for the longest request with all its samples, and the watermark.
    num_blocks = n * ceil_div(SMALL.max_model_len, block_size) + 2
    cache = PrefixCache(num_blocks, block_size=block_size)
    sim = PagedSim(cache, SMALL.requests(seed), n, seed)
    result = sim.run(300, warm_up=50)
    assert result.num_finished > 0
    assert result.num_preempted > 0
    assert sum(result.shares) == pytest.approx(1)
    assert 0 <= result.waste < 1
    sim.close()
    assert cache.pool.num_free == num_blocks
    assert (cache.num_cached, cache.num_evictable) == (0, 0)


def test_first_come_first_served_also_after_a_preemption() -> None:
    sim = PagedSim(PrefixCache(20, block_size=4), SMALL.requests(2))
    result = sim.run(1, warm_up=0)
    for _ in range(300):
        result = sim.run(1, warm_up=0)
        order = [group.request.index for group in sim._residents + list(sim._queue)]
        assert order == sorted(order)
    assert result.num_preempted > 0


def test_more_memory_is_never_fewer_residents() -> None:
    held = [
        PagedSim(PrefixCache(blocks, block_size=4), SMALL.requests(0)).run(400, 100).num_resident
        for blocks in (40, 80, 160)
    ]
    assert held == sorted(held)


# -- the whole benchmark -------------------------------------------------------------------------------


def quiet() -> Progress:
    return Progress(console=Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plot") / "memory.png"


@pytest.fixture(scope="module")
def report(picture: Path) -> Report:
    return run(seed=0, plot=picture, progress=quiet(), settings=SHORT)


def test_all_figures_are_there(report: Report) -> None:
    named = {
        "waste_contiguous_max_sharegpt",
        "waste_paged_sharegpt_16",
        "waste_paged_sharegpt_32",
        "resident_paged_over_max",
        "resident_paged_over_exact_buddy",
        *(f"parallel_saving_n{n}_percent" for n in PAPER_SAVING),
        *(f"waste_paged_sharegpt_{size}" for size in BLOCK_SIZES),
        *(f"table_bytes_per_sequence_{size}" for size in BLOCK_SIZES),
    }
    assert named <= set(report.metrics)
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert {"resident_paged_over_max", "waste_paged_sharegpt_16"} <= {t.name for t in report.targets}


def test_metrics_agree_with_each_other(report: Report) -> None:
    m = report.metrics
    # As many of the longest requests as fit, whatever the lengths; the rest of the pool is one useless hole.
    fit = bench_memory.NUM_SLOTS // SHAREGPT.max_model_len
    assert m["resident_contiguous_max"] == fit
    rest = bench_memory.NUM_SLOTS - fit * SHAREGPT.max_model_len
    assert m["external_contiguous_max_sharegpt"] == pytest.approx(rest / bench_memory.NUM_SLOTS)
    assert m["waste_contiguous_max_sharegpt"] == pytest.approx(1 - m["used_contiguous_max_sharegpt"])
    assert m["resident_paged_over_max"] == pytest.approx(m["resident_paged_16"] / fit)
    for size in BLOCK_SIZES:
        taken = 1 - m[f"free_paged_sharegpt_{size}"]
        assert m[f"waste_paged_sharegpt_{size}"] == pytest.approx(
            m[f"internal_paged_sharegpt_{size}"] / taken
        )
    waste = [m[f"waste_paged_sharegpt_{size}"] for size in BLOCK_SIZES]
    entries = [m[f"table_entries_per_sequence_{size}"] for size in BLOCK_SIZES]
    assert waste == sorted(waste)
    assert entries == sorted(entries, reverse=True)


def test_the_claims_that_need_no_long_run_hold(report: Report) -> None:
    unmet = {target.name for target in report.targets if not target.met and target.kind == "must"}
    # How much is shared is a mean over long-tailed lengths, which a short run does not settle.
    assert {name for name in unmet if not name.startswith("parallel_saving")} == set()


def test_the_same_seed_is_the_same_report(report: Report) -> None:
    assert run(seed=0, progress=quiet(), settings=SHORT).metrics == report.metrics


def test_the_picture_is_a_png_with_something_on_it(report: Report, picture: Path) -> None:
    from matplotlib.image import imread

    assert picture.read_bytes().startswith(b"\x89PNG")
    pixels = imread(picture)
    assert min(pixels.shape[:2]) > 800
    assert (pixels[..., :3] < 0.95).any(axis=-1).mean() > 0.1


def test_people_see_a_table_for_each_claim(report: Report) -> None:
    out = io.StringIO()
    console = Console(file=out, width=140)
    for table in report.tables:
        console.print(table)
    text = out.getvalue()
    for words in ("blocks of 16", "largest hole", "samples", "table bytes"):
        assert words in text


def test_progress_names_each_phase_where_no_bar_can_be_drawn() -> None:
    progress = quiet()
    bench_memory.measure(0, SHORT, progress)
    file = progress.console.file
    assert isinstance(file, io.StringIO)
    assert "parallel sampling, n = 6" in file.getvalue()


def test_without_matplotlib_one_line_says_so_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_memory, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'ramet\[plot\]'") as failure:
        run(plot=tmp_path / "memory.png")
    assert "\n" not in str(failure.value)
