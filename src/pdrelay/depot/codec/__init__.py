"""Wire codecs by name. Their libraries are the extra `codec`: import only through `codec_named`."""

from __future__ import annotations

from typing import Literal, get_args

from pdrelay.depot.codec.base import WireCodec
from pdrelay.errors import StartError

CodecName = Literal["none", "zstd", "fp8", "int8"]
NAMES: tuple[CodecName, ...] = get_args(CodecName)
LOSSY: tuple[CodecName, ...] = ("fp8", "int8")


def codec_named(name: CodecName, key: str) -> WireCodec | None:
    """The codec that `key` of the configuration asks for; None for `none`. Raises StartError without its library."""
    try:
        if name == "zstd":
            from pdrelay.depot.codec.zstd import ZstdCodec

            return ZstdCodec()
        if name in LOSSY:
            from pdrelay.depot.codec.quantised import Fp8, Int8, QuantisedCodec

            return QuantisedCodec(Int8() if name == "int8" else Fp8())
    except ImportError as error:
        remedy = "install pdrelay[codec] on this host, or configure `none`"
        raise StartError(f"{key}: codec {name!r} needs {error.name}, which is not installed: {remedy}") from error
    return None
