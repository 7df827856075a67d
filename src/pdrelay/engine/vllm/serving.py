"""Serves `engine/serving.py` with the chat endpoint of the vLLM API server that the plug-in is in."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import TYPE_CHECKING

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from pdrelay.engine.server import accept
from pdrelay.engine.serving import Ask, FromServing, Reply, decode_to_serving, encode
from pdrelay.engine.vllm.pipeline import Pipeline, PipelineClient

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.v1.engine.async_llm import AsyncLLM

_log = logging.getLogger(__name__)
_PROTOCOL_VIOLATION = 1002


class ServingLayer:
    """Answers chat requests whose tokens come from the gateway."""

    def __init__(self, engine: AsyncLLM, chat: OpenAIServingChat) -> None:
        self._engine, self._chat = engine, chat

    async def serve(self, websocket: WebSocket) -> None:
        """Serves one connection, which is one request, to its end."""
        if await accept(websocket):
            await _Exchange(websocket, self._engine, self._chat).run()


class _Exchange:
    """One request."""

    def __init__(self, websocket: WebSocket, engine: AsyncLLM, chat: OpenAIServingChat) -> None:
        self._websocket = websocket
        self._unsent: list[FromServing] = []
        self._wake = asyncio.Event()
        self._pipeline = Pipeline(self._send)
        self._client = PipelineClient(engine, self._pipeline)
        self._chat = copy.copy(chat)
        self._chat.engine_client = self._client
        self._answer: asyncio.Task[None] | None = None

    async def run(self) -> None:
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks += [self._answer] if self._answer is not None else []
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()
        for error in results:
            if isinstance(error, Exception) and not isinstance(error, WebSocketDisconnect):
                _log.error("serving a request failed", exc_info=error)

    async def _read(self) -> None:
        while True:
            try:
                messages = decode_to_serving(await self._websocket.receive_bytes())
            except (msgspec.DecodeError, KeyError) as error:
                await self._websocket.close(_PROTOCOL_VIOLATION, f"malformed frame: {error}"[:100])
                return
            for message in messages:
                if not isinstance(message, Ask):
                    self._pipeline.feed(message)
                elif self._answer is None:
                    self._answer = asyncio.create_task(self._respond(message))

    async def _write(self) -> None:
        last = False
        while not last:
            await self._wake.wait()
            self._wake.clear()
            messages, self._unsent = self._unsent, []
            await self._websocket.send_bytes(encode(messages))
            last = any(isinstance(message, Reply) and message.last for message in messages)
        await self._websocket.close()

    def _send(self, message: FromServing) -> None:
        self._unsent.append(message)
        self._wake.set()

    async def _respond(self, ask: Ask) -> None:
        try:
            request = ChatCompletionRequest.model_validate_json(ask.body)
            result = await self._chat.create_chat_completion(request)
        except Exception as error:  # vLLM says which status it has
            result = self._chat.create_error_response(error)
        if isinstance(result, ErrorResponse):
            self._send(Reply(status=result.error.code, data=result.model_dump_json().encode(), last=True))
        elif isinstance(result, ChatCompletionResponse):
            self._send(Reply(data=result.model_dump_json().encode(), last=True))
        else:
            async for event in result:
                self._send(Reply(stream=True, data=event.encode()))
            self._send(Reply(stream=True, last=True))
