"""How the payload of a run is laid out on the wire: as it is in the arena."""

from __future__ import annotations

from collections.abc import Callable

from pdrelay.depot import link_messages as link

ReadInto = Callable[[memoryview], None]
"""Fills the whole view from a connection. Raises OSError when it breaks."""


_SCRATCH = 1 << 18


def wire_form(run: link.Run, data: memoryview) -> memoryview:
    """What goes on the wire for `run`, whose parts are `data` in the sender's arena. Runs in a connection's thread."""
    assert len(data) == run.payload
    return data


def read_run(run: link.Run, into: memoryview, read_into: ReadInto) -> None:
    """Reads the wire form of `run` and puts its parts `into` a view of `run.payload` bytes.

    Runs in a connection's thread. Raises OSError when the connection breaks.
    """
    assert len(into) == run.payload
    read_into(into)


def discard_run(run: link.Run, read_into: ReadInto) -> None:
    """Reads the wire form of a `run` that nobody needs. Raises OSError when the connection breaks."""
    size = run.payload
    scratch = memoryview(bytearray(min(size, _SCRATCH)))
    while size:
        take = min(size, _SCRATCH)
        read_into(scratch[:take])
        size -= take
