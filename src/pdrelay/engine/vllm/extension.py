"""Methods that any of vLLM's workers gets from us: `--worker-extension-cls`."""

from __future__ import annotations

import msgspec
from vllm.distributed.kv_transfer import get_kv_transfer_group

from pdrelay.engine.vllm.connector import PdrelayConnector


class WorkerExtension:
    """Called by `collective_rpc`."""

    def pdrelay_kv_contract(self) -> bytes:
        """The KV contract of this engine, as JSON."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, PdrelayConnector)
        return msgspec.json.encode(connector.contract)
