import msgspec
import pytest

from pdrelay.errors import ContractError
from pdrelay.kv.contract import KVContract

CONTRACT = KVContract(
    model="m",
    revision="",
    layers=30,
    heads=3,
    head_size=64,
    dtype="bfloat16",
    page_tokens=32,
    part_bytes=24576,
    codec="c",
)


def test_sizes():
    assert CONTRACT.parts == 30
    assert CONTRACT.page_bytes == 737_280
    assert CONTRACT.bytes_per_token == 23_040


def test_a_difference_names_the_field_and_both_values():
    other = msgspec.structs.replace(CONTRACT, codec="d")
    with pytest.raises(ContractError, match="codec: 'c' here, 'd' there"):
        CONTRACT.require_equal(other)
    CONTRACT.require_equal(msgspec.structs.replace(CONTRACT))
