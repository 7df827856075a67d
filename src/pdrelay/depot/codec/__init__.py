"""Wire codecs by name. Their libraries are the extra `codec`: import only through `codec_named`."""

from __future__ import annotations

from pdrelay.cluster.topology import CodecName
from pdrelay.depot.codec.base import WireCodec
from pdrelay.errors import StartError


def codec_named(name: CodecName, key: str) -> WireCodec | None:
    """The codec that `key` of the configuration asks for; None for `none`. Raises StartError without its library."""
    try:
        if name == "zstd":
            from pdrelay.depot.codec.zstd import ZstdCodec

            return ZstdCodec()
        if name != "none":
            from pdrelay.depot.codec.quantised import Fp8, Int8, QuantisedCodec

            return QuantisedCodec(Int8() if name == "int8" else Fp8())
    except ImportError as error:
        remedy = "install pdrelay[codec] on this host, or configure `none`"
        raise StartError(f"{key}: codec {name!r} needs {error.name}, which is not installed: {remedy}") from error
    return None
