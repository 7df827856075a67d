from __future__ import annotations

from array import array

from xxhash import xxh3_64_intdigest

from pdrelay.depot import link_messages as link
from pdrelay.depot.base import PageKind
from pdrelay.depot.inbox import Inbox, Landed
from pdrelay.depot.page import Page
from pdrelay.depot.payload import LinkCodecs
from pdrelay.kv.contract import Layout

NAME, PART = b"n" * 32, 64


def run_of(epoch: int, payload: bytes) -> link.Run:
    checksums = array("Q", [xxh3_64_intdigest(payload)]).tobytes()
    return link.Run(NAME, epoch, 0, PART, checksums)


def receive(inbox: Inbox, sender: str, run: link.Run, payload: bytes) -> list[Landed]:
    landed: list[Landed] = []

    def read_into(view: memoryview) -> None:
        view[:] = payload[: len(view)]

    inbox.receive(sender, run, read_into, landed)
    return landed


def test_late_parts_of_another_sender_do_not_shut_out_those_that_are_wanted() -> None:
    """Epochs of two depots cannot be compared: a late one of the other may be higher than any to come."""
    arena = bytearray(PART)
    inbox = Inbox(memoryview(arena), LinkCodecs())
    inbox.open(Page(NAME, PageKind.PREFIX, Layout(1, PART), 0, 1, "transfer"), "near")
    late, wanted = b"l" * PART, b"w" * PART
    assert receive(inbox, "far", run_of(200, late), late) == []
    (landed,) = receive(inbox, "near", run_of(100, wanted), wanted)
    assert landed.good == 1
    assert arena == wanted
