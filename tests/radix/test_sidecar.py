"""Log-probabilities beside the tokens: they go where the tokens go."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, nan
from typing import Any

from ramet.radix.cursor import Cursor
from ramet.radix.sidecar import known_logprobs, write_logprobs

MakeSim = Callable[..., Any]


def known(cursor: Cursor) -> list[float | None]:
    return [None if isnan(number) else number for number in known_logprobs(cursor)]


def test_nothing_is_known_until_it_is_written_and_no_node_pays(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(10))
    assert known(branch) == [None] * 10
    assert branch.node.logprobs is None
    write_logprobs(branch, 1, [-1.0, nan, -3.0])
    assert known(branch) == [None, -1.0, None, -3.0, *[None] * 6]
    sim.close()


def test_the_open_block_keeps_nothing(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(6))
    write_logprobs(branch, 0, [nan, -1.0, -2.0, -3.0, -4.0, -5.0])
    assert known(branch) == [None, -1.0, -2.0, -3.0, None, None]
    sim.write((branch, [6, 7, 8]))
    assert known(branch) == [None, -1.0, -2.0, -3.0, *[None] * 5]
    write_logprobs(branch, 4, [-4.0, -5.0])
    assert known(branch)[:6] == [None, -1.0, -2.0, -3.0, -4.0, -5.0]
    sim.close()


def test_a_split_divides_and_a_hit_inside_a_block_reads_its_part(make_sim: MakeSim) -> None:
    sim = make_sim(12)
    first = sim.prompt(range(12))
    write_logprobs(first, 1, [-float(i) for i in range(1, 12)])
    other = sim.prompt([*range(8), 90, 91])  # splits at 8
    assert known(other) == [None, *(-float(i) for i in range(1, 8)), None, None]
    borrower = sim.attach([*range(10), 99])
    assert known(borrower) == [None, *(-float(i) for i in range(1, 10))]
    assert known(first) == [None, *(-float(i) for i in range(1, 12))]
    sim.close()


def test_a_duplicate_keeps_what_is_there_and_gets_what_is_new(make_sim: MakeSim) -> None:
    sim = make_sim(12)
    one, two = sim.attach(range(8)), sim.attach(range(8))
    sim.write((one, range(8)), (two, range(8)))  # the second is dropped
    write_logprobs(one, 1, [-1.0, -2.0])
    write_logprobs(two, 1, [-9.0, -2.0, -3.0])
    assert known(one) == known(two) == [None, -1.0, -2.0, -3.0, None, None, None, None]
    sim.close()


def test_it_survives_parking_and_goes_with_the_blocks(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(8))
    write_logprobs(branch, 1, [-1.0] * 7)
    branch.release()
    again = sim.attach(range(8))
    assert known(again) == [None, *[-1.0] * 7]
    again.release()
    sim.cache.tree.evict(1)
    shorter = sim.prompt(range(8))
    assert known(shorter) == [None, -1.0, -1.0, -1.0, None, None, None, None]
    sim.close()
