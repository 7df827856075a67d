"""vLLM's CPU worker with a model runner that knows requests which have output tokens from elsewhere.

Model runner V2 (GPUs) rebuilds a request from all its tokens by itself and keys its random numbers by position; V1,
the only one on CPUs, needs this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from pdrelay.engine.vllm import private_api
from pdrelay.errors import StartError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput


class SessionModelRunner(CPUModelRunner):  # type: ignore[misc]  # vLLM's classes are untyped here
    """Restores output tokens, and the random state that belongs to their number.

    INV-RNG-1: a seeded request has drawn exactly one random number for each of its output tokens.
    """

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            if new.prefill_token_ids is not None and new.req_id not in self.requests:
                # A known request takes the streaming path below, which restores its output tokens.
                self.requests[new.req_id] = self._state_of(new)
        return super()._update_states(scheduler_output)

    def _update_streaming_request(self, req_id: str, new_req_data: NewRequestData) -> CachedRequestState:
        state = super()._update_streaming_request(req_id, new_req_data)
        if new_req_data.prefill_token_ids is not None:
            state.output_token_ids.extend(new_req_data.prefill_token_ids[state.num_prompt_tokens :])
        _restore_random_state(state)
        return state

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM takes back a random number drawn for a prefill chunk by a generator's offset, which CPUs lack."""
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        hidden = {index: batch.generators.pop(index) for index in discarded if index in batch.generators}
        for index in hidden:
            _restore_random_state(self.requests[batch.req_ids[index]])
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            batch.generators.update(hidden)

    def _state_of(self, new: NewRequestData) -> CachedRequestState:
        generator = None
        if new.sampling_params is not None and new.sampling_params.seed is not None:
            generator = torch.Generator(device=self.device)
        return CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            prompt_embeds=new.prompt_embeds,
            prompt_is_token_ids=new.prompt_is_token_ids,
            mm_features=new.mm_features,
            sampling_params=new.sampling_params,
            pooling_params=new.pooling_params,
            generator=generator,
            block_ids=new.block_ids,
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=[],
            lora_request=new.lora_request,
        )


def _restore_random_state(state: CachedRequestState) -> None:
    """INV-RNG-1. vLLM's CPU sampler draws this number, once a token."""
    if state.generator is None:
        return
    state.generator.manual_seed(state.sampling_params.seed)
    for _ in state.output_token_ids:
        torch.randint(0, 2**31, (1,), generator=state.generator, dtype=torch.long)


class PdrelayCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM's classes are untyped here
    """A CPU worker with `SessionModelRunner`."""

    def init_device(self) -> None:
        """Raises StartError for model runner V2 and for another vLLM than expected."""
        private_api.check(private_api.CPU)
        super().init_device()
        if self.use_v2_model_runner:
            raise StartError("model runner V2 on CPUs is not supported: unset VLLM_USE_V2_MODEL_RUNNER")
        self.model_runner = SessionModelRunner(self.vllm_config, torch.device("cpu"))
