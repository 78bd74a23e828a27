"""What several branches hold together, against a count block by block."""

from __future__ import annotations

import random

from ramet.radix.cursor import Cursor
from ramet.radix.prefix_cache import PrefixCache
from ramet.radix.shares import shares_of
from ramet.radix.tokens import pack


def write(cache: PrefixCache, cursor: Cursor, tokens: list[int]) -> None:
    (reservation,) = cache.reserve([(cursor, len(tokens))])
    cache.take_copies()
    cache.copies_done()
    cache.commit(reservation, pack(tokens))


def test_no_branches_hold_nothing() -> None:
    assert shares_of({}) == []
    cache = PrefixCache(8, 4)
    assert shares_of({0: cache.attach("a", b"")}) == []


def test_a_fork_shares_all_that_came_before() -> None:
    cache = PrefixCache(16, 4)
    root = cache.attach("a", b"")
    write(cache, root, [1, 2, 3, 4, 5, 6])
    left, right = root.fork(), root.fork()
    write(cache, left, [7, 8, 9])
    stem, open_tail, left_block, left_tail = sorted(
        shares_of({10: root, 11: left, 12: right}), key=lambda share: (share.start, share.end)
    )
    assert (stem.start, stem.end, stem.num_users, stem.parent, stem.ending) == (0, 4, 3, None, [])
    assert (open_tail.end, open_tail.num_users, open_tail.ending) == (6, 2, [10, 12])
    assert (left_block.end, left_block.num_users, left_block.ending) == (8, 1, [])
    assert (left_tail.start, left_tail.end, left_tail.ending) == (8, 9, [11])
    assert len({block for share in shares_of({0: root, 1: left}) for block in share.blocks}) == 4


def test_against_a_count_block_by_block() -> None:
    rng = random.Random(5)
    for _ in range(30):
        cache = PrefixCache(256, 4)
        branches = [cache.attach("a", b"")]
        write(cache, branches[0], rng.choices(range(3), k=rng.randint(1, 20)))
        for _ in range(rng.randint(1, 25)):
            branch = rng.choice(branches)
            match rng.randrange(3):
                case 0:
                    branches.append(branch.fork(rng.randint(1, branch.length)))
                case 1:
                    write(cache, branch, rng.choices(range(3), k=rng.randint(1, 9)))
                case 2:
                    branch.truncate(rng.randint(1, branch.length))
        filled: dict[int, int] = {}
        users: dict[int, set[int]] = {}
        for name, branch in enumerate(branches):
            for index, block in enumerate(branch.block_ids()):
                filled[block] = max(filled.get(block, 0), min(4, branch.length - 4 * index))
                users.setdefault(block, set()).add(name)
        shares = shares_of(dict(enumerate(branches)))
        assert sum(share.num_tokens for share in shares) == sum(filled.values())
        assert sorted(block for share in shares for block in share.blocks) == sorted(filled)
        assert sorted(name for share in shares for name in share.ending) == list(range(len(branches)))
        for index, share in enumerate(shares):
            assert share.num_users == len(users[share.blocks[0]])
            assert share.parent is None or (share.parent < index and shares[share.parent].end == share.start)
            assert (share.parent is None) == (share.start == 0)
