"""Profile files: how fast one engine on one kind of hardware is, and how its KV looks. See `docs/profiles.md`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from pdrelay.cluster import toml
from pdrelay.cluster.units import parse_size
from pdrelay.errors import ConfigError
from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.names import UNIT_TOKENS

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


class Kv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's KV and the memory that an engine has for it."""

    layers: int
    heads: int  # KV heads
    head_size: int
    dtype: Literal["float32", "float16", "bfloat16", "fp8"]
    page_tokens: int
    capacity: str  # KV memory of the engine, such as 2GiB

    @property
    def part_bytes(self) -> int:
        """Bytes of one layer of one page: K and V of every head and token."""
        return 2 * self.heads * self.head_size * self.page_tokens * _DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layers * self.part_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token."""
        return self.page_bytes // self.page_tokens

    @property
    def capacity_pages(self) -> int:
        """Pages that the engine's KV memory holds."""
        return parse_size(self.capacity) // self.page_bytes


class ForwardCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a forward pass over many tokens of one request (prefill, extend)."""

    fixed: float
    per_token: float
    per_pair: float  # for each pair of a token and one that it attends to


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a decode step."""

    fixed: float
    per_sequence: float
    per_context_token: float  # for each token in the contexts of the batch


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine's scheduler admits."""

    max_num_seqs: int
    prefill_chunk: int  # tokens of one prefill chunk; decode steps run in between


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Emulated engines only: which token ids they make."""

    first: int
    last: int  # inclusive
    eos: int
    eos_probability: float = 0.0


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one kind of hardware."""

    description: str
    kv: Kv
    prefill: ForwardCost
    decode: DecodeCost
    extend: ForwardCost
    limits: Limits
    vocabulary: Vocabulary

    def contract(self, model: str, revision: str = "") -> KVContract:
        """The KV contract of an emulated engine with this profile."""
        kv = self.kv
        return KVContract(
            model=model,
            revision=revision,
            page_tokens=kv.page_tokens,
            block_tokens=kv.page_tokens,
            groups=(
                KVGroup(
                    layers=kv.layers,
                    heads=kv.heads,
                    head_size=kv.head_size,
                    dtype=kv.dtype,
                    part_bytes=kv.part_bytes,
                    codec="emulated",
                ),
            ),
        )


def load(path: Path) -> Profile:
    """Reads and checks a profile. Raises ConfigError naming file, key, what was found and what is expected."""
    profile = toml.convert(path, toml.read(path), Profile)
    for key, found, expected in _problems(profile):
        raise ConfigError(f"{path}: {key}: found {found}, expected {expected}")
    return profile


def shipped(name: str) -> Path:
    """Path of a profile that comes with the package. Raises ConfigError naming those there are."""
    directory = Path(str(resources.files("pdrelay.perf"))) / "profiles"
    path = directory / f"{name}.toml"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in directory.glob("*.toml")))
        raise ConfigError(f"profile: found {name!r}, expected one of {names}")
    return path


Problem = tuple[str, object, str]


def _problems(profile: Profile) -> Iterable[Problem]:
    """Everything that types alone do not say."""
    for table, fields in (("kv", ("layers", "heads", "head_size")), ("limits", ("max_num_seqs", "prefill_chunk"))):
        for field in fields:
            value = getattr(getattr(profile, table), field)
            if value < 1:
                yield f"{table}.{field}", value, "at least 1"
    if profile.kv.page_tokens < 1 or profile.kv.page_tokens % UNIT_TOKENS:
        yield "kv.page_tokens", profile.kv.page_tokens, f"a multiple of {UNIT_TOKENS}"
    yield from _capacity_problems(profile.kv)
    for table in ("prefill", "decode", "extend"):
        for field in getattr(profile, table).__struct_fields__:
            value = getattr(getattr(profile, table), field)
            if value < 0:
                yield f"{table}.{field}", value, "seconds, at least 0"
    yield from _vocabulary_problems(profile.vocabulary)


def _capacity_problems(kv: Kv) -> Iterable[Problem]:
    try:
        pages = kv.capacity_pages
    except ValueError:
        yield "kv.capacity", repr(kv.capacity), "a size such as 512MiB or 4GiB"
    else:
        if not pages:
            yield "kv.capacity", repr(kv.capacity), f"room for one page of {kv.page_bytes} bytes at least"


def _vocabulary_problems(vocabulary: Vocabulary) -> Iterable[Problem]:
    if vocabulary.first < 0:
        yield "vocabulary.first", vocabulary.first, "a token id, at least 0"
    if vocabulary.last - vocabulary.first < 1:
        yield "vocabulary.last", vocabulary.last, f"a token id above {vocabulary.first}"
    if vocabulary.first <= vocabulary.eos <= vocabulary.last:
        yield "vocabulary.eos", vocabulary.eos, "a token id outside of first to last"
    if not 0 <= vocabulary.eos_probability < 1:
        yield "vocabulary.eos_probability", vocabulary.eos_probability, "a number from 0 to below 1"
