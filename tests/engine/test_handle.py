"""A session's handle: what its listener sees, and what it tells the engine."""

from pdrelay.engine.handle import SessionHandle
from pdrelay.engine.messages import Abort, Failed, Finished, Opened


class Closing:
    """A listener that closes the session at its first event."""

    def __init__(self, handle: SessionHandle) -> None:
        self.handle, self.events = handle, []

    def event(self, event):
        self.events.append(event)
        self.handle.abort()

    def lost(self, message):
        raise AssertionError(message)


async def closed_at(event):
    sent, ended = [], []
    handle = SessionHandle("s", sent.append, ended.append)
    listener = Closing(handle)
    handle.listen(listener)
    handle.deliver(event)
    assert (listener.events, ended) == ([event], ["s"])
    return sent


async def test_a_session_that_has_ended_by_itself_is_not_aborted_by_a_listener_that_closes_it():
    assert await closed_at(Finished(sid="s", reason="stop")) == []
    assert await closed_at(Failed(sid="s", status=500, message="gone")) == []


async def test_one_that_goes_on_is():
    opened = Opened(sid="s", cached_tokens=0, loaded_tokens=0, pages_ready=0.0, ready=0.0)
    assert await closed_at(opened) == [Abort("s")]
