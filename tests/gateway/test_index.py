from pdrelay.depot.base import Forgotten, Removed, Stored
from pdrelay.gateway.index import PageIndex

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def test_only_the_leading_run_counts_over_all_holders():
    index = PageIndex()
    index.apply(Stored("host-b", [A, C]))
    assert index.leading([A, B, C], "host-b") == 1
    index.apply(Stored("md-0", [B]))
    assert index.leading([A, B, C], "host-b", "md-0") == 3
    assert index.leading([A, B, C], "md-0") == 0


def test_removed_and_forgotten_pages_do_not_count():
    index = PageIndex()
    index.apply(Stored("host-b", [A, B]))
    index.apply(Removed("host-b", [A]))
    assert index.leading([A, B], "host-b") == 0
    index.apply(Stored("host-b", [A]))
    index.apply(Forgotten("host-b"))
    assert index.leading([A], "host-b") == 0
    index.apply(Removed("unknown", [A]))
