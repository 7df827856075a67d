"""vLLM's scheduler with Extend-Decode: tokens that another engine made join a running request as *output* tokens.

Stock vLLM has resumable requests, but adds what it is fed to the prompt; then penalties, seeds, `min_tokens`,
`max_tokens`, grammars and stop conditions no longer mean what they meant. Here appended tokens are output tokens.

INV-SESSION-3: tokens sampled but not computed are dropped when a chunk arrives; what remains is exactly what was fed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import RequestStatus

from pdrelay.engine.vllm import private_api, session_params
from pdrelay.engine.vllm.connector import PdrelayConnector
from pdrelay.engine.vllm.grammar import SessionGrammars, set_reasoning
from pdrelay.engine.vllm.hybrid import HybridScheduling

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, StreamingUpdate


class SessionScheduling(HybridScheduling):
    """Goes before `Scheduler` or `AsyncScheduler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        private_api.check()
        super().__init__(*args, **kwargs)
        self._grammars = SessionGrammars(self.structured_output_manager)
        self.structured_output_manager: Any = self._grammars

    def add_request(self, request: Request) -> None:
        """A new request may come with output tokens; prompt and they are then computed in one forward pass."""
        set_reasoning(request)
        eager = session_params.eager(request.sampling_params)
        if eager and request.request_id not in self.requests:
            request.append_output_token_ids(eager)
            # vLLM counts prefill by prompt length, and asserts that a cache hit is not longer than that.
            request.prefill_stats = None
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Also tells the model runner of the output tokens that a request has when it is scheduled first."""
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            if request.num_output_tokens and new.prefill_token_ids is None:
                new.prefill_token_ids = list(request.all_token_ids)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Also sends the connector's report with a request's first output."""
        if isinstance(self.connector, PdrelayConnector) and model_runner_output.kv_connector_output is not None:
            self.connector.scheduler_side.before_output(model_runner_output.kv_connector_output)
        results: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if isinstance(self.connector, PdrelayConnector):
            for result in results.values():
                for output in result.outputs:
                    if output.kv_transfer_params is None:
                        output.kv_transfer_params = self.connector.scheduler_side.take_report(output.request_id)
        return results

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Also tells the connector."""
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if done and isinstance(self.connector, PdrelayConnector):
            self.connector.scheduler_side.prefix_cache_reset()
        return done

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        compiling = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ready: bool = super()._handle_blocked_waiting_request(request)
        if ready and compiling:
            self._feed_grammar(request, session_params.eager(request.sampling_params))
        return ready

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        chunk = list(update.prompt_token_ids or ())
        self._drop_uncomputed(session)
        session.append_output_token_ids(chunk)
        self._feed_grammar(session, chunk)
        session.sampling_params, session.max_tokens = update.sampling_params, update.max_tokens
        session.stop_reason = None  # of a sample that was thrown away
        session.arrival_time = update.arrival_time
        if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            self.num_waiting_for_streaming_input -= 1
        session.status = RequestStatus.WAITING
        if self.log_stats:
            session.record_event(EngineCoreEventType.QUEUED)

    def _drop_uncomputed(self, session: Request) -> None:
        computed = session.num_computed_tokens
        dropped = session.num_tokens - computed
        assert 0 <= dropped <= session.num_output_tokens, "INV-SESSION-3: only samples are dropped"
        if dropped:
            del session._all_token_ids[computed:]
            del session._output_token_ids[-dropped:]
            del session.block_hashes[computed // self.hash_block_size :]

    def _feed_grammar(self, request: Request, tokens: list[int]) -> None:
        """Tokens that the grammar forbids end the request with an error, as vLLM ends it for its own samples."""
        if not self._grammars.feed(request, tokens):
            self.grammar_compile_error_reqs.add(request.request_id)


class PdrelayScheduler(SessionScheduling):
    """For engines without asynchronous scheduling: CPUs."""


class PdrelayAsyncScheduler(SessionScheduling, AsyncScheduler):  # type: ignore[misc]  # vLLM's classes are untyped here
    """For engines with asynchronous scheduling: GPUs."""
