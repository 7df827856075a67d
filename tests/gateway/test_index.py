from pdrelay.depot.base import Forgotten, Removed, Stored
from pdrelay.gateway.index import PageIndex
from pdrelay.kv.contract import KVGroup
from pdrelay.kv.names import PromptPages, in_group

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
FULL = KVGroup(layers=1, heads=1, head_size=1, dtype="int8", part_bytes=64, codec="c")
WINDOW = KVGroup(
    kind="sliding_window", window=16, layers=1, heads=1, head_size=1, dtype="int8", part_bytes=64, codec="c"
)


def usable(index: PageIndex, *names: bytes, groups=(FULL,)) -> int:
    pages = PromptPages(names, None, 16, 16 * len(names))
    return index.usable(pages, groups, "host-b", "md-0")


def test_only_the_leading_run_counts_over_depot_and_engine():
    index = PageIndex()
    index.apply(Stored("host-b", [A, C]))
    assert usable(index, A, B, C) == 16
    index.apply(Stored("md-0", [B]))
    assert usable(index, A, B, C) == 48
    index.apply(Removed("host-b", [A, C]))
    assert usable(index, A, B, C) == 0


def test_each_kv_group_counts_for_itself():
    index = PageIndex()
    index.apply(Stored("host-b", [in_group(A, 1)]))
    index.apply(Stored("md-0", [A, B]))
    assert usable(index, A, B, groups=(FULL, WINDOW)) == 16
    index.apply(Stored("host-b", [in_group(B, 1)]))
    assert usable(index, A, B, groups=(FULL, WINDOW)) == 32


def test_removed_and_forgotten_pages_do_not_count():
    index = PageIndex()
    index.apply(Stored("host-b", [A, B]))
    index.apply(Removed("host-b", [A]))
    assert usable(index, A, B) == 0
    index.apply(Stored("host-b", [A]))
    index.apply(Forgotten("host-b"))
    assert usable(index, A) == 0
    index.apply(Removed("unknown", [A]))
