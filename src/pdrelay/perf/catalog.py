"""What comes with the package: models, chips and instances of the papers, each number with its origin.

The files are `perf/data/*.toml`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pdrelay.cluster import toml
from pdrelay.errors import ConfigError
from pdrelay.perf.hardware import Chip, Kind, Number
from pdrelay.perf.instance import InstanceProfile, PrefillTable
from pdrelay.perf.model import Dtypes, ModelKv, kv_of
from pdrelay.perf.profile import DecodeCost, ForwardCost


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the papers. KV comes from `config`, or is given where no config is published."""

    name: str
    total: Number  # parameters
    active: Number  # parameters that one token uses
    source: str
    config: dict[str, Any] = {}
    kv_dtype: str = "bfloat16"
    index_dtype: str = ""
    kv_per_token: Number | None = None
    kv_fixed: Number | None = None

    def kv(self, dtypes: Dtypes | None = None) -> ModelKv:
        """KV sizes; `dtypes` other than the model's own ask what another storage would take."""
        if self.kv_per_token is not None:
            return ModelKv(self.kv_per_token.value, 0.0, 0, self.kv_fixed.value if self.kv_fixed else 0.0, {})
        return kv_of(self.config, dtypes or Dtypes(self.kv_dtype, self.index_dtype))


class PublishedInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An instance as a paper's tables give it: prefill by length, decode as a rate at one step time."""

    name: str
    model: str
    chip: str
    chips: int
    prefill_kind: Kind
    prefill_source: str
    tokens: list[float] = []
    seconds: list[float] = []
    prefill: ForwardCost | None = None
    decode_rate: Number  # tokens/s at a full batch
    decode_step: Number  # seconds

    def profile(self) -> InstanceProfile:
        """The instance. Its decode step takes `decode_step` whatever the batch, up to the batch that makes the rate."""
        model, hardware = find_model(self.model), find_chip(self.chip)
        kv, step = model.kv(), self.decode_step.value
        prefill: ForwardCost | PrefillTable
        prefill = self.prefill or PrefillTable(tokens=tuple(self.tokens), seconds=tuple(self.seconds))
        memory = hardware.memory.value * self.chips if hardware.memory else 0.0
        return InstanceProfile(
            name=self.name,
            prefill=prefill,
            decode=DecodeCost(fixed=step, per_sequence=0.0, per_context_token=0.0),
            extend=ForwardCost(fixed=step, per_token=0.0, per_pair=0.0),
            kv_per_token=kv.per_token,
            kv_fixed=kv.fixed,
            # The paper gives weights no size; fp8 weights are assumed, as on such chips.
            kv_capacity=max(memory * 0.9 - model.total.value, memory * 0.1),
            max_num_seqs=round(self.decode_rate.value * step),
            prefill_chunk=8192,
            price=hardware.price.value * self.chips,
            notes=(
                f"prefill: {self.prefill_kind}, {self.prefill_source}",
                f"decode: {self.decode_rate.kind}, {self.decode_rate.source}",
            ),
        )


class _Chips(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chip: list[Chip]


class _Models(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: list[Model]


class _Instances(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    instance: list[PublishedInstance]


@cache
def chips() -> tuple[Chip, ...]:
    """All chips."""
    return tuple(_load("chips", _Chips).chip)


@cache
def models() -> tuple[Model, ...]:
    """All models."""
    return tuple(_load("models", _Models).model)


@cache
def instances() -> tuple[PublishedInstance, ...]:
    """All instances that a paper's tables describe."""
    return tuple(_load("instances", _Instances).instance)


def find_chip(name: str) -> Chip:
    """The chip called `name`. Raises ConfigError naming those there are."""
    return _find("chip", name, chips())


def find_model(name: str) -> Model:
    """The model called `name`. Raises ConfigError naming those there are."""
    return _find("model", name, models())


def find_instance(name: str) -> PublishedInstance:
    """The instance called `name`. Raises ConfigError naming those there are."""
    return _find("instance", name, instances())


Named = TypeVar("Named", Chip, Model, PublishedInstance)
File = TypeVar("File", _Chips, _Models, _Instances)


def _find(kind: str, name: str, known: tuple[Named, ...]) -> Named:
    for item in known:
        if item.name == name:
            return item
    raise ConfigError(f"{kind}: found {name!r}, expected one of {', '.join(item.name for item in known)}")


def _load(name: str, kind: type[File]) -> File:
    path = Path(str(resources.files("pdrelay.perf"))) / "data" / f"{name}.toml"
    return toml.convert(path, toml.read(path), kind)
