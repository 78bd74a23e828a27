"""How full blocks enter the tree: grow, add a child, or move onto what is there already.

Whole runs of blocks are compared, not single ones. Where the tree already holds the same tokens its block
stays and ours is dropped, after the cursor's row has been repointed; where it holds the tokens but no block
(a ghost) it adopts ours.
"""

from __future__ import annotations

from ramet.radix.cursor import Cursor
from ramet.radix.tree import Node, RadixTree


def publish(cursor: Cursor, key: bytearray, blocks: list[int]) -> int:
    """Put `blocks`, which hold the tokens `key` right after `cursor.node`, into the tree.

    The cursor comes to rest behind them. Returns how many duplicates were dropped. O(blocks), and O(path)
    only where the cursor moves onto a path that nobody stood on.
    """
    tree = cursor.cache.tree
    size = tree.block_bytes
    num_dropped = 0
    done = 0
    while done < len(blocks):
        node = cursor.node
        index = node.end // tree.block_size  # of this part of the run in the block table
        child = node.children.get(bytes(key[done * size : (done + 1) * size]))
        if child is None:
            _append(cursor, key[done * size :], blocks[done:])
            break
        agreed = _agreed_blocks(child, key, done, len(blocks), size)
        if agreed * size < len(child.key) and agreed <= len(child.blocks) and _can_slide(node):
            theirs = tree.slide(node, child, agreed)
        else:
            theirs = _step_onto(cursor, child, agreed, blocks[done : done + agreed], tree)
        for offset, block in enumerate(theirs):
            _repoint(cursor, index + offset, blocks[done + offset], block)
        num_dropped += len(theirs)
        done += agreed
    return num_dropped


def _append(cursor: Cursor, key: bytearray, blocks: list[int]) -> None:
    """No child continues like `key`: lengthen the node if it is this cursor's alone, else add a child."""
    tree, node = cursor.cache.tree, cursor.node
    alone = node.cursors == 1 and not node.children and not node.seats and node.parent is not None
    if alone:
        tree.grow(node, key, blocks)
    else:
        cursor.move(tree.add_child(node, key, blocks), touch=False)


def _agreed_blocks(child: Node, key: bytearray, done: int, total: int, size: int) -> int:
    """How many leading blocks of `child` the run continues with, at least the first."""
    most = min(len(child.key) // size, total - done)
    if child.key[: most * size] == key[done * size : (done + most) * size]:
        return most
    agreed, at = 1, (done + 1) * size
    while child.key[agreed * size : (agreed + 1) * size] == key[at : at + size]:
        agreed += 1
        at += size
    return agreed


def _can_slide(node: Node) -> bool:
    """Whether the border below `node` is this cursor's alone. Otherwise a twin's decode, one block at a
    time along an idle path, would leave one node a block."""
    return node.cursors == 1 and not node.seats and len(node.children) == 1 and node.parent is not None


def _step_onto(cursor: Cursor, child: Node, agreed: int, blocks: list[int], tree: RadixTree) -> list[int]:
    """Move the cursor behind the first `agreed` blocks of `child`; ghosts among them adopt ours.

    Returns the resident blocks that take the place of our leading ones.
    """
    target = tree.node_ending(child, agreed)
    cursor.move(target, touch=False)
    theirs = list(target.blocks)
    if len(theirs) < agreed:
        tree.adopt(target, blocks[len(theirs) :])
    return theirs


def _repoint(cursor: Cursor, index: int, mine: int, theirs: int) -> None:
    """Use their block instead of mine. First the row, then the drop: a row never names a free block."""
    if cursor.row is not None:
        cursor.row[index] = theirs
    cursor.cache.pool.drop(mine)
