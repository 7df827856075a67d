"""What the engine's own cache holds, told from the blocks that it hands out. Needs no vLLM."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdrelay.engine.vllm.held import HeldBlocks

NAMES = [bytes([number]) * 32 for number in range(4)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("fill"), st.integers(0, 5), st.sampled_from(NAMES)),
        st.tuples(st.just("allocate"), st.integers(0, 5), st.none()),
        st.tuples(st.just("look"), st.none(), st.none()),
        st.tuples(st.just("clear"), st.none(), st.none()),
    )
)


@given(steps)
def test_the_told_names_are_those_in_some_block(steps: list[tuple[str, int, bytes]]) -> None:
    held, blocks, told = HeldBlocks(), {}, set()
    for action, block, name in [*steps, ("look", None, None)]:
        if action == "fill":
            held.fill([block], name)
            blocks[block] = name
        elif action == "allocate":
            held.hand_out([block])
            blocks.pop(block, None)
        elif action == "clear":
            held.clear()
            blocks.clear()
        else:
            changes = held.take_changes()
            assert not told & set(changes.added)
            assert told >= set(changes.removed)
            told = (told | set(changes.added)) - set(changes.removed)
            assert told == set(blocks.values())


def test_a_new_depot_is_told_everything() -> None:
    held = HeldBlocks()
    held.fill([1], NAMES[0])
    assert held.take_changes().added == [NAMES[0]]
    held.forget_reports()
    assert held.take_changes() == ([NAMES[0]], [])


def test_a_page_of_several_blocks_is_held_while_all_of_them_are() -> None:
    held = HeldBlocks(slots=2)
    held.fill([1, 2], NAMES[0])
    assert held.take_changes().added == [NAMES[0]]
    held.hand_out([2])
    assert held.take_changes().removed == [NAMES[0]]
    held.fill([3, 4], NAMES[0])  # another request's
    assert held.take_changes().added == [NAMES[0]]
    held.hand_out([1])
    assert held.take_changes() == ([], [])
