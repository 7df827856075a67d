"""vLLM's endpoint plug-in: mounts the session protocol on the stock API server.

vLLM loads it by the entry point `pdrelay` of `vllm.endpoint_plugins` when `VLLM_PLUGINS` names it. The path is under
`/inference`, which vLLM guards with its API key.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import msgspec
from prometheus_client import REGISTRY
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from pdrelay.depot.control_client import control_over_unix
from pdrelay.engine.messages import PATH, Hello, Parsers
from pdrelay.engine.server import SessionServer
from pdrelay.engine.serving import SERVING_PATH
from pdrelay.engine.vllm import private_api, settings
from pdrelay.engine.vllm.admission import Budget
from pdrelay.engine.vllm.backend import VllmBackend
from pdrelay.engine.vllm.serving import ServingLayer
from pdrelay.errors import StartError
from pdrelay.kv.contract import KVContract

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient
    from vllm.lora.request import LoRARequest


class PdrelayEndpoints:
    """Serves one `VllmBackend` to any number of gateways."""

    name: ClassVar = "pdrelay"
    required_tasks: ClassVar = ("generate",)

    def __init__(self) -> None:
        self._server: SessionServer | None = None
        self._serving: ServingLayer | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Mounts the routes; vLLM has no engine yet."""
        app.router.routes.append(WebSocketRoute(PATH, self._serve))
        app.router.routes.append(WebSocketRoute(SERVING_PATH, self._serve_request))

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """The engine runs. Raises StartError when it was started without our connector."""
        if engine_client is None:
            return
        parsers = None
        if state.openai_serving_chat is not None:
            private_api.check(private_api.SERVING)
            self._serving = ServingLayer(engine_client, state.openai_serving_chat)
            tools = args.tool_call_parser if args.enable_auto_tool_choice else None
            parsers = Parsers(tools=tools or "", reasoning=args.structured_outputs_config.reasoning_parser or "")
        loras = state.openai_serving_models.lora_requests
        self._server = SessionServer(await backend_of(engine_client, parsers, loras))

    async def _serve_request(self, websocket: WebSocket) -> None:
        assert self._serving is not None
        await self._serving.serve(websocket)

    async def _serve(self, websocket: WebSocket) -> None:
        assert self._server is not None
        await self._server.serve(websocket)


async def backend_of(
    engine_client: EngineClient, parsers: Parsers | None = None, loras: Mapping[str, LoRARequest] | None = None
) -> VllmBackend:
    """The backend on a running vLLM engine, connected to the depot of its host. Raises StartError, ConfigError."""
    config = engine_client.vllm_config
    if config.kv_transfer_config is None:
        raise StartError("the endpoint plug-in pdrelay needs an engine with --kv-transfer-config")
    own = settings.parse(config.kv_transfer_config.kv_connector_extra_config)
    contracts = await engine_client.collective_rpc("pdrelay_kv_contract")
    contract = msgspec.json.decode(contracts[0], type=KVContract)
    return VllmBackend(
        engine_client,
        control_over_unix(own.depot_socket, f"engine {own.instance}"),
        Hello(
            instance=own.instance,
            epoch=uuid4().hex,
            model=_served_name(config),
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            contract=contract,
            parsers=parsers,
        ),
        budget_of(config),
        lambda: kv_usage(config),
        loras,
    )


def budget_of(config: VllmConfig) -> Budget:
    """What the engine's sessions may hold."""
    cache = config.cache_config
    tokens = cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size
    return Budget(tokens, cache.block_size, config.scheduler_config.max_num_seqs)


def kv_usage(config: VllmConfig) -> float:
    """How full the KV cache is, 0 to 1, from vLLM's own metrics."""
    labels = {"model_name": _served_name(config), "engine": "0"}
    return REGISTRY.get_sample_value("vllm:kv_cache_usage_perc", labels) or 0.0


def _served_name(config: VllmConfig) -> str:
    name = config.model_config.served_model_name
    return name if isinstance(name, str) else name[0]
