"""What is noted of branches' blocks, and that nothing is before somebody asks."""

from __future__ import annotations

from ramet import LLM, Branch
from ramet.engine.block_changes import BlockChanges
from ramet.engine.look import look_at_changes
from ramet.testing import ScriptedModel


def make(num_blocks: int, max_batch_tokens: int = 512) -> LLM:
    return LLM(
        ScriptedModel(lambda past: 1, 100),
        num_blocks=num_blocks,
        block_size=4,
        max_batch_tokens=max_batch_tokens,
    )


def changes(llm: LLM, *branches: Branch) -> BlockChanges:
    return look_at_changes(llm.engine.scheduler, [branches], [False])[0]


def test_only_branches_that_somebody_holds_are_noted() -> None:
    llm = make(32)
    root = llm.branch([2] * 6)
    assert llm.engine.scheduler.changes is None
    assert not changes(llm).of
    llm.generate([3] * 9, max_tokens=20)
    root.score([[5, 6], [7, 8]])
    assert set(changes(llm).of) <= {root.id}
    kids = root.fork(2)
    kids[0].generate(max_tokens=4)
    noted = changes(llm, *kids).of
    assert (len(noted[kids[0].id].copies), noted[kids[0].id].took) == (
        1,
        True,
    )  # 6 tokens, and 3 that are fed
    assert noted[kids[0].id].given_up == noted[kids[0].id].restored == []


def test_a_tree_is_looked_at_only_if_it_is_concerned_or_asked_for() -> None:
    llm = make(32)
    first, second = llm.branch([2] * 6), llm.branch([3] * 6)
    changes(llm)
    first.generate(max_tokens=8)
    _, looks = look_at_changes(llm.engine.scheduler, [[first], [second], [second]], [False, False, True])
    assert [look is not None for look in looks] == [True, False, True]
    assert not changes(llm).of


def test_what_is_computed_again_in_chunks_is_counted_once() -> None:
    llm = make(8, max_batch_tokens=5)
    parked = llm.branch([2] * 18)
    changes(llm)
    table = parked.block_table.blocks
    llm.generate([3] * 30, max_tokens=1)  # needs all blocks
    change = changes(llm).of[parked.id]
    assert (change.given_up, change.given_up_tokens) == (table, 18)
    parked.extend([4] * 4)
    parked.generate(max_tokens=1)
    change = changes(llm).of[parked.id]
    assert (change.is_back, change.found_tokens, change.restored_tokens) == (True, 0, 18)
    assert change.restored == parked.block_table.blocks[:5]  # 18 tokens
    assert change.took  # a sixth block, for the new tokens
    parked.truncate(10)
    parked.generate(max_tokens=4)
    assert changes(llm).of[parked.id].restored_tokens == 0  # they were there


def test_tokens_that_were_cut_off_while_parked_are_not_restored() -> None:
    llm = make(8)
    parked = llm.branch([2] * 18)
    changes(llm)
    llm.generate([3] * 30, max_tokens=1)
    parked.truncate(10)
    parked.extend([4] * 10)
    changes(llm)
    parked.generate(max_tokens=1)
    assert changes(llm).of[parked.id].restored_tokens == 10


def test_who_finds_more_of_its_tokens_computed_by_others_is_not_back_from_anything() -> None:
    llm = make(16)
    branch = llm.branch([2] * 18)
    changes(llm)
    llm.generate([3] * 62, max_tokens=1)
    branch.generate(max_tokens=1)  # back: all 18 have KV again
    assert changes(llm).of[branch.id].is_back
    token_ids = [*branch.token_ids, *[4] * 12]
    branch.extend([4] * 12)
    llm.generate(token_ids, max_tokens=1)
    branch.generate(max_tokens=1)
    change = changes(llm).of[branch.id]
    assert (change.is_back, change.found_tokens) == (False, len(token_ids) - len(token_ids) % 4)
