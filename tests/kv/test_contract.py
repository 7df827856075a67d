import msgspec
import pytest

from pdrelay.errors import ContractError
from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.names import in_group

FULL = KVGroup(layers=30, heads=3, head_size=64, dtype="bfloat16", part_bytes=24576, codec="c")
WINDOW = KVGroup(
    kind="sliding_window", window=512, layers=4, heads=3, head_size=64, dtype="bfloat16", part_bytes=1024, codec="c"
)
CONTRACT = KVContract(model="m", revision="", page_tokens=32, block_tokens=32, groups=(FULL, WINDOW))


def test_sizes_follow_from_groups_and_shards():
    assert [layout[:2] for layout in CONTRACT.layouts] == [(30, 24576), (4, 1024)]
    assert CONTRACT.page_bytes == 737_280 + 4096
    assert CONTRACT.bytes_per_token == 23_040, "windows do not grow with the prompt"
    halves = msgspec.structs.replace(FULL, part_bytes=12288)
    sharded = msgspec.structs.replace(CONTRACT, shards=2, groups=(halves,))
    assert [layout[:2] for layout in sharded.layouts] == [(60, 12288)]
    assert sharded.page_bytes == 737_280


def test_the_layout_of_a_page_follows_from_the_group_in_its_name():
    name = b"n" * 32
    assert CONTRACT.layout_of(name)[:2] == (30, 24576)
    assert CONTRACT.layout_of(in_group(name, 1))[:2] == (4, 1024)
    with pytest.raises(ContractError, match="groups: 2 here"):
        CONTRACT.layout_of(in_group(name, 2))


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (msgspec.structs.replace(CONTRACT, block_tokens=16), "block_tokens: 32 here, 16 there"),
        (
            msgspec.structs.replace(CONTRACT, groups=(FULL, msgspec.structs.replace(WINDOW, codec="d"))),
            r"groups\[1\].codec: 'c' here, 'd' there",
        ),
        (
            msgspec.structs.replace(CONTRACT, groups=(FULL,)),
            "groups: 'full_attention, sliding_window' here, 'full_attention' there",
        ),
    ],
)
def test_a_difference_names_the_field_and_both_values(other: KVContract, complaint: str):
    with pytest.raises(ContractError, match=complaint):
        CONTRACT.require_equal(other)
    CONTRACT.require_equal(msgspec.structs.replace(CONTRACT))
