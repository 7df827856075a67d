"""`pdrelay bench codec`: what each wire codec saves, costs and changes, on the KV of a real model.

Prompts are prefilled once. Their pages go through a codec, and the model decodes from what comes out, as main decode
would: the first token is the prefill's, further tokens add exact KV to the prompt's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, median
from time import thread_time
from typing import NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from pdrelay.bench.kv_model import KVModel, Page, Prefilled
from pdrelay.bench.machine import Machine, describe
from pdrelay.cluster.topology import CodecName
from pdrelay.depot.codec import codec_named
from pdrelay.depot.codec.base import WireCodec
from pdrelay.errors import BenchError

CODECS: tuple[CodecName, ...] = tuple(name for name in get_args(CodecName) if name != "none")
PASSES = 5
SHORTEST = 32
BATCH = 10  # prompts decoded together
CHUNK = 64
RECOMPUTED = f"none, chunks of {CHUNK}"
"""No codec, but a prefill in chunks of so many tokens: as exact, and rounded otherwise."""


class Settings(NamedTuple):
    """The options of the command."""

    model: Path
    dtype: str = "bfloat16"
    codecs: Sequence[CodecName] = CODECS
    prompts: int = 50
    prompt_tokens: int = 512  # the longest prompt; the others are spread down to `SHORTEST`
    tokens: int = 64


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and seconds of one core; bytes are those of the KV, before encoding."""

    ratio: float  # KV bytes for each byte on the line
    encode_rate: float  # bytes per second of CPU time
    decode_rate: float

    @property
    def break_even(self) -> float:
        """Line rate, bytes per second and core at each end, above which sending as it is delivers more."""
        return min(self.encode_rate, self.decode_rate)

    @property
    def full_gain(self) -> float:
        """Line rate, bytes per second and core at each end, up to which the link delivers `ratio` times as much."""
        return self.break_even / self.ratio


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What decoding from other KV than the prefill's changes."""

    agreement: float  # share of greedy tokens, all prompts, that are the same at the same place
    unchanged: int  # prompts whose tokens are all the same
    first_divergence: float | None  # median place, over the others, of the first other token; the prefill's is 0
    logprob_error: float  # mean |difference| of the log probability of the exact run's next token, given its tokens
    worst_logprob_error: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way for KV to come to main decode."""

    name: str
    speed: Speed | None = None
    effect: Effect


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    bench: str = "codec"
    machine: Machine
    command: str
    model: str = ""
    dtype: str = ""
    prompts: int = 0
    prompt_tokens: int = 0  # of all prompts
    tokens: int = 0  # greedy, a prompt
    kv_bytes: int = 0  # of all pages
    rows: list[Row] = []
    failures: dict[str, str] = {}


class Reference(NamedTuple):
    """A prompt decoded from its exact KV."""

    prompt: list[int]
    prefilled: Prefilled
    ids: list[int]
    log_probabilities: npt.NDArray[np.float64]


def new_report(command: str) -> Report:
    """A report without results."""
    return Report(machine=describe(), command=command)


async def run(settings: Settings, report: Report, progress: Callable[[str], None]) -> None:
    """Fills `report`. Raises BenchError, StartError."""
    codecs = [codec for name in settings.codecs if (codec := codec_named(name, "--codec")) is not None]
    progress("loading the model")
    model = KVModel(settings.model, settings.dtype)
    report.model, report.dtype = settings.model.name, settings.dtype
    prompts = prompts_of(model.tokenizer.encode, settings.prompts, settings.prompt_tokens)
    references = _references(model, prompts, settings.tokens, progress)
    report.prompts, report.tokens = len(references), settings.tokens
    report.prompt_tokens = sum(len(reference.prompt) for reference in references)
    pages = [page for reference in references for page in reference.prefilled.pages]
    report.kv_bytes = sum(page.nbytes for page in pages)
    for codec in codecs:
        name = codec.name
        progress(f"speed of {name}")
        speed = measure_speed(codec, pages, model)
        through = [_through(codec, reference.prefilled, model) for reference in references]
        report.rows.append(Row(name=name, speed=speed, effect=_effect(model, references, through, name, progress)))
    again = [model.prefill(reference.prompt, CHUNK) for reference in references]
    report.rows.append(Row(name=RECOMPUTED, effect=_effect(model, references, again, RECOMPUTED, progress)))


def prompts_of(encode: Callable[[str], list[int]], count: int, longest: int) -> list[list[int]]:
    """English text, the same for each version of Python: topics of its reference, cut to lengths up to `longest`.

    Raises BenchError when there is too little of it.
    """
    texts = sorted((encode(topics[name]) for name in sorted(topics)), key=len)[-count:]
    lengths = np.linspace(min(SHORTEST, longest), longest, count).astype(int).tolist()
    if len(texts) < count or any(len(ids) < length for ids, length in zip(texts, lengths, strict=True)):
        raise BenchError(f"too little text for {count} prompts of up to {longest} tokens")
    return [ids[:length] for ids, length in zip(texts, lengths, strict=True)]


def measure_speed(codec: WireCodec, pages: Sequence[Page], model: KVModel) -> Speed:
    """Every page as a run, encoded and decoded on one core; medians of some passes over all of them."""
    layout = model.contract.layouts[0]
    into = memoryview(bytearray(layout.page_bytes))
    wire, encoding, decoding = 0, [], []
    for _ in range(PASSES):
        wire, spent, begun = 0, 0.0, thread_time()
        for page in pages:
            encoded = codec.encode(page.data.cast("B"), layout.part_bytes, layout.shape)
            if encoded is None:
                wire += page.nbytes
                continue
            wire += len(encoded)
            switched = thread_time()
            codec.decode(memoryview(encoded), into, layout.part_bytes, layout.shape)
            spent += thread_time() - switched
        encoding.append(thread_time() - begun - spent)
        decoding.append(spent)
    payload = sum(page.nbytes for page in pages)
    return Speed(
        ratio=payload / wire, encode_rate=payload / median(encoding), decode_rate=payload / max(median(decoding), 1e-9)
    )


def _references(
    model: KVModel, prompts: Sequence[list[int]], tokens: int, progress: Callable[[str], None]
) -> list[Reference]:
    prefilled = []
    for number, prompt in enumerate(prompts, 1):
        progress(f"prefill: prompt {number} of {len(prompts)}")
        prefilled.append(model.prefill(prompt))
    references: list[Reference] = []
    for some in _batches(len(prompts), "exact", progress):
        ids = model.greedy(prefilled[some], tokens)
        log_probabilities = model.log_probabilities(prefilled[some], ids)
        references += map(Reference, prompts[some], prefilled[some], ids, log_probabilities)
    return references


def _through(codec: WireCodec, prefilled: Prefilled, model: KVModel) -> Prefilled:
    """What arrives at the other end of a link with this codec."""
    layout = model.contract.layouts[0]
    arrived = []
    for page in prefilled.pages:
        encoded, into = codec.encode(page.data.cast("B"), layout.part_bytes, layout.shape), np.empty_like(page)
        if encoded is None:
            into[:] = page
        else:
            codec.decode(memoryview(encoded), into.data.cast("B"), layout.part_bytes, layout.shape)
        arrived.append(into)
    return prefilled._replace(pages=arrived)


def _effect(
    model: KVModel, references: Sequence[Reference], others: Sequence[Prefilled], name: str,
    progress: Callable[[str], None],
) -> Effect:  # fmt: skip
    same: list[list[bool]] = []
    errors: list[float] = []
    for some in _batches(len(others), name, progress):
        exact = references[some]
        ids = model.greedy(others[some], len(exact[0].ids))
        same += [[a == b for a, b in zip(one.ids, other, strict=True)] for one, other in zip(exact, ids, strict=True)]
        found = model.log_probabilities(others[some], [reference.ids for reference in exact])
        errors += np.abs(found - [reference.log_probabilities for reference in exact]).ravel().tolist()
    diverged = [places.index(False) for places in same if not all(places)]
    return Effect(
        agreement=fmean(place for places in same for place in places),
        unchanged=len(same) - len(diverged),
        first_divergence=median(diverged) if diverged else None,
        logprob_error=fmean(errors),
        worst_logprob_error=max(errors),
    )


def _batches(prompts: int, what: str, progress: Callable[[str], None]) -> Iterator[slice]:
    for start in range(0, prompts, BATCH):
        progress(f"{what}: prompt {start + 1} of {prompts}")
        yield slice(start, start + BATCH)
