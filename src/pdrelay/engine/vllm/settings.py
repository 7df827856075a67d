"""What an engine process is told through `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdrelay.errors import ConfigError


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance's settings. `model` and `revision` are those that enter page names."""

    instance: str
    depot_socket: str
    model: str
    revision: str = ""
    adapters: dict[str, str] = {}  # LoRA adapters by name, and what stands for each in page names
    publish_decode: bool = False  # publish every whole page this engine computes, those of its output included
    shards: int = 0  # shares of a layer in every page of the fleet; 0: as many as this engine's ranks keep


def parse(extra_config: Mapping[str, object]) -> Settings:
    """The settings in vLLM's extra config. Raises ConfigError naming what is wrong."""
    try:
        return msgspec.convert(dict(extra_config), Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
