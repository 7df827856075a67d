"""A CPU worker whose steps take a given time at least, for measurements on a machine that several engines share.

Engines that decode as fast as they can take every core there is, and the pauses of a stream are then those of the
machine's scheduler. With a step longer than its work takes, the cores are idle in between, as they are beside an
engine that has a device of its own.
"""

from __future__ import annotations

import os
import time
from typing import Any

from pdrelay.engine.vllm.launch import STEP_SECONDS
from pdrelay.engine.vllm.worker import PdrelayCPUWorker


class SteadyCPUWorker(PdrelayCPUWorker):
    """Sleeps at the end of a step that took less than `STEP_SECONDS`; steps without tokens are as short as they are."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """One forward pass, as the class above does it."""
        due = time.monotonic() + float(os.environ[STEP_SECONDS])
        result = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            time.sleep(max(0.0, due - time.monotonic()))
        return result
