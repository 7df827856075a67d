"""Codecs on their own: what comes back, and what becomes of bytes that no codec made."""

from __future__ import annotations

import sys
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay.depot.codec import CodecName, codec_named
from pdrelay.depot.codec.base import WireCodec
from pdrelay.depot.codec.quantised import LEAST, MOST, Fp8
from pdrelay.errors import ProtocolError, StartError
from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.shape import ITEM_BYTES, PartShape

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}
TOP = {"int8": 127, "fp8": 448}

shapes = st.builds(
    PartShape, st.sampled_from(sorted(DTYPES)), blocks=st.integers(1, 2),
    outer=st.integers(1, 2), heads=st.integers(1, 3), middle=st.integers(1, 2), inner=st.integers(8, 40),
)  # fmt: skip
kinds = st.lists(
    st.sampled_from(["ordinary", "zero", "denormal", "huge", "bits", "nan", "infinite"]), min_size=1, max_size=9
)


def codec(name: CodecName) -> WireCodec:
    made = codec_named(name, "link[0].codec")
    assert made is not None
    return made


def run_of(kinds_: list[str], shape: PartShape, seed: int) -> npt.NDArray[np.uint8]:
    """Parts of these kinds, `[parts, bytes]`."""
    random = np.random.default_rng(seed)
    dtype, count = DTYPES[shape.dtype], shape.elements
    size = count * shape.item_bytes
    limits = ml_dtypes.finfo(dtype)

    def part(kind: str) -> npt.NDArray[np.uint8]:
        if kind == "bits":
            return np.frombuffer(random.bytes(size), np.uint8)
        scale = {"denormal": float(limits.smallest_subnormal) * 40, "huge": float(limits.max) / 8, "zero": 0.0}
        values = np.clip(random.standard_normal(count) * scale.get(kind, 3.0), -float(limits.max), float(limits.max))
        if kind in ("nan", "infinite"):
            values[random.integers(count)] = np.nan if kind == "nan" else -np.inf
        return values.astype(dtype).view(np.uint8)

    return np.stack([part(kind) for kind in kinds_])


def through(codec: WireCodec, run: npt.NDArray[np.uint8], shape: PartShape) -> tuple[npt.NDArray[np.uint8], int]:
    """What arrives, and the bitmap of the parts that are said not to be exact."""
    encoded = codec.encode(memoryview(run).cast("B"), run.shape[1], shape)
    if encoded is None:
        return run, 0
    out = bytearray(run.nbytes)
    inexact = codec.decode(memoryview(encoded), memoryview(out), run.shape[1], shape)
    return np.frombuffer(out, np.uint8).reshape(run.shape), inexact


@settings(deadline=None)
@given(shapes, kinds, st.integers(0, 1 << 32))
def test_zstd_keeps_every_bit(shape: PartShape, kinds: list[str], seed: int) -> None:
    run = run_of(kinds, shape, seed)
    out, inexact = through(codec("zstd"), run, shape)
    assert (out == run).all()
    assert inexact == 0


def test_zstd_takes_dtypes_that_it_does_not_know() -> None:
    run = np.frombuffer(b"opaque state" * 333, np.uint8).reshape(3, -1)
    out, inexact = through(codec("zstd"), run, PartShape("int8"))
    assert (out == run).all()
    assert inexact == 0


def test_zstd_gives_up_on_noise() -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(1 << 16), np.uint8)
    assert codec("zstd").encode(memoryview(noise), len(noise), PartShape("bfloat16")) is None


@pytest.mark.parametrize("name", ["int8", "fp8"])
@settings(deadline=None)
@given(shape=shapes, kinds=kinds, seed=st.integers(0, 1 << 32))
def test_quantised_parts_are_within_half_a_step_or_exact(
    name: CodecName, shape: PartShape, kinds: list[str], seed: int
) -> None:
    run = run_of(kinds, shape, seed)
    out, inexact = through(codec(name), run, shape)
    axes = (shape.blocks, shape.outer, shape.heads, shape.middle, 2, shape.inner)
    for at, kind in enumerate(kinds):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            before, after = (x[at].view(DTYPES[shape.dtype]).astype(np.float64).reshape(axes) for x in (run, out))
        peak = np.abs(before).max(axis=(1, 3, 5), keepdims=True)
        if not inexact >> at & 1:
            assert (out[at] == run[at]).all()
            fits = np.isfinite(peak) & ((peak == 0) | ((peak >= LEAST) & (peak <= MOST)))
            assert not fits.all(), f"{kind} could have been quantised"
            continue
        scale = peak / TOP[name]
        step = scale if name == "int8" else spacing(np.abs(before), scale)
        rounding = np.abs(after) * 2.0 ** -(MANTISSA[shape.dtype] + 1) + float(
            ml_dtypes.finfo(DTYPES[shape.dtype]).smallest_subnormal
        )
        assert (np.abs(after - before) <= step / 2 * (1 + 1e-5) + rounding).all()


def spacing(magnitude: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Distance of the E4M3 numbers around `magnitude`, times `scale`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.floor(np.log2(np.where(scale > 0, magnitude / scale, 0)))
    return scale * 2.0 ** (np.maximum(exponent, -6) - 3)


def test_a_part_that_is_not_finite_is_exact_among_others_that_are_not() -> None:
    shape = PartShape("bfloat16", heads=3, inner=64)
    run = run_of(["ordinary", "nan", "ordinary", "infinite", "ordinary"], shape, 1)
    for name in ("int8", "fp8"):
        out, inexact = through(codec(name), run, shape)
        assert inexact == 0b10101
        assert (out[[1, 3]] == run[[1, 3]]).all()


def test_each_head_and_half_of_a_block_has_its_own_scale() -> None:
    shape = PartShape("float32", blocks=2, outer=2, heads=2, middle=3, inner=16)
    values = np.random.default_rng(3).standard_normal((1, 2, 2, 2, 3, 2, 16)).astype(np.float32)
    values *= np.array([[1, 1e-6], [1e6, 1e-3], [1e3, 1e-9], [1e9, 1]], np.float32).reshape(1, 2, 1, 2, 1, 2, 1)
    run = values.reshape(1, -1).view(np.uint8)
    for name in ("int8", "fp8"):
        out, _ = through(codec(name), run, shape)
        error = np.abs(out.view(np.float32).reshape(values.shape) - values).max(axis=(0, 2, 4, 6))
        assert (error < np.abs(values).max(axis=(0, 2, 4, 6)) / 25).all()


def test_fp8_is_e4m3() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.isfinite(expected)
    assert (Fp8().unpack(codes)[finite] == expected[finite]).all()
    halves = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    halves = halves[np.abs(halves) <= 448]
    assert (Fp8().pack(halves.copy()) == halves.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()


@pytest.mark.parametrize("name", ["zstd", "int8", "fp8"])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_what_no_codec_made_is_refused_or_fills_the_parts(name: CodecName, data: st.DataObject) -> None:
    shape = PartShape(data.draw(st.sampled_from(sorted(DTYPES))), heads=2, inner=16)
    run = run_of(["ordinary", "nan", "zero", "ordinary"], shape, 5)
    encoded = bytearray(codec(name).encode(memoryview(run).cast("B"), run.shape[1], shape) or b"")
    for at in data.draw(st.lists(st.integers(0, len(encoded) - 1), max_size=4)):
        encoded[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(-8, len(encoded)))
    mutated = bytes(encoded) if cut is None else bytes(encoded[:cut]) if cut >= 0 else bytes(encoded) + bytes(-cut)
    into = bytearray(b"\xaa" * run.nbytes)
    try:
        inexact = codec(name).decode(memoryview(mutated), memoryview(into), run.shape[1], shape)
    except ProtocolError:
        return
    assert inexact < 1 << len(run)


def test_a_decompression_bomb_costs_nothing() -> None:
    shape = PartShape("bfloat16")
    bomb = zstandard.ZstdCompressor().compress(bytes(16 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(16 << 20))
    small = bytearray(4096)
    tracemalloc.start()
    try:
        for frame in (bomb, unsized):
            encoded = len(frame).to_bytes(4, "little") * 2 + frame * 2
            with pytest.raises(ProtocolError):
                codec("zstd").decode(memoryview(encoded), memoryview(small), 4096, shape)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["zstd", "int8", "fp8"])
def test_threads_may_share_a_codec(name: CodecName) -> None:
    shape, shared = PartShape("bfloat16", heads=3, inner=2048), codec(name)
    runs = [run_of(["ordinary"] * 4, shape, seed) for seed in range(4)]
    alone = [bytes(codec(name).encode(memoryview(run).cast("B"), run.shape[1], shape) or b"") for run in runs]
    wrong: list[int] = []

    def work(at: int) -> None:
        for _ in range(6):
            encoded = shared.encode(memoryview(runs[at]).cast("B"), runs[at].shape[1], shape)
            if bytes(encoded or b"") != alone[at] or not (through(shared, runs[at], shape)[0].any()):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_missing_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pdrelay.depot.codec.zstd", raising=False)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(StartError, match=r"link\[2\].codec: .*zstandard.*pdrelay\[codec\]"):
        codec_named("zstd", "link[2].codec")
    assert codec_named("none", "link[2].codec") is None


def contract_of(layout: str, *, page_tokens: int = 32, shards: int = 1, **changes: object) -> KVContract:
    fields: dict[str, object] = {
        "layers": 30, "heads": 4, "head_size": 64, "dtype": "bfloat16", "codec": layout,
        "part_bytes": page_tokens * max(1, 4 // shards) * 2 * 64 * ITEM_BYTES["bfloat16"],
    }  # fmt: skip
    group = KVGroup(**(fields | changes))  # type: ignore[arg-type]
    return KVContract(model="m", revision="", page_tokens=page_tokens, block_tokens=32, shards=shards, groups=(group,))


@pytest.mark.parametrize(
    ("contract", "shape"),
    [
        (contract_of("vllm-cpu/LBHNC/amx"), PartShape("bfloat16", 1, 1, 4, 1, 32 * 64)),
        (contract_of("vllm-cpu/LBHNC/vec", page_tokens=64), PartShape("bfloat16", 2, 1, 4, 1, 32 * 64)),
        (contract_of("vllm-cpu/LBHNC/vec", shards=2), PartShape("bfloat16", 1, 1, 2, 1, 32 * 64)),
        (contract_of("vllm-cpu/LBHNC/vec", shards=8), PartShape("bfloat16", 1, 1, 1, 1, 32 * 64)),
        (contract_of("vllm-cuda/LBHNC"), PartShape("bfloat16", 1, 1, 4, 32, 64)),
        (contract_of("vllm-cuda/LBNHC", page_tokens=64), PartShape("bfloat16", 2, 32, 4, 1, 64)),
        (contract_of("vllm-cuda/LHBNC"), PartShape("bfloat16")),
        (contract_of("emulated"), PartShape("bfloat16")),
        (contract_of("vllm-cpu/LBHNC/vec", kind="mla", heads=1), PartShape("bfloat16")),
        (contract_of("vllm-cpu/LBHNC/vec", kind="linear_state", dtype="int8"), PartShape("int8")),
        (contract_of("vllm-cpu/LBHNC/vec", part_bytes=1 << 17), PartShape("bfloat16")),  # padded
    ],
)
def test_the_shape_of_a_part_follows_from_its_contract(contract: KVContract, shape: PartShape) -> None:
    assert contract.layouts[0].shape == shape
