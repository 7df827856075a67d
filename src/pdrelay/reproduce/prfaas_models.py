"""Tables 3 and 5 of PrfaaS and its egress figures, from the models' configs where they are public."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from pdrelay.perf.catalog import find_instance, find_model
from pdrelay.perf.instance import PrefillTable
from pdrelay.perf.stages import egress_demand, kv_throughput
from pdrelay.reproduce.rows import Row, RowKind

LENGTHS = (1024, 8192, 32_768, 131_072)
NAMES = ("1K", "8K", "32K", "128K")
KV_THROUGHPUT = {  # Gbit/s
    "Kimi Linear": (1.19, 2.29, 3.87, 4.88),
    "MiMo-V2-Flash": (0.82, 2.85, 4.66, 4.71),
    "Qwen3.5-397B": (4.13, 6.28, 8.25, 7.47),
    "Ring-2.5-1T": (7.27, 4.47, 2.59, 1.46),
    "MiniMax-M2.5": (4.94, 32.87, 59.93, 47.82),
    "Qwen3-235B": (4.12, 22.42, 33.35, 21.50),
}
TABLE5_KV = (190.8, 308.9, 701.3, 2316.3)  # MiB
TABLE5_THROUGHPUT = (3.61, 3.59, 3.19, 2.62)  # Gbit/s
INSTANCES = 64  # 512 H200


class Fitted(NamedTuple):
    """Prefill seconds of a model on 8 H200: fixed, for each token, for each pair of tokens."""

    fixed: float
    per_token: float
    per_pair: float

    def seconds(self, tokens: float) -> float:
        """Of a prompt without a cached prefix."""
        return self.fixed + self.per_token * tokens + self.per_pair * tokens * (tokens + 1) / 2


def model_rows() -> list[Row]:
    """Table 3, section 2's figures and Table 5."""
    return [*_table3(), *_egress(), *_structure(), *_table5()]


@cache
def prefill_seconds(model: str) -> tuple[float, ...]:
    """What Table 3 implies: the KV of each length, by the model's config, over its throughput."""
    kv = find_model(model).kv()
    rates = KV_THROUGHPUT[model]
    return tuple(kv.bytes_for(tokens) * 8e-9 / rate for tokens, rate in zip(LENGTHS, rates, strict=True))


def prefill_table(model: str) -> PrefillTable:
    """The same as an instance's prefill times."""
    return PrefillTable(tokens=tuple(map(float, LENGTHS)), seconds=prefill_seconds(model))


@cache
def fitted(model: str) -> Fitted:
    """The cost through 1K, 32K and 128K."""
    chosen = [0, 2, 3]
    terms = np.array([[1.0, LENGTHS[i], LENGTHS[i] * (LENGTHS[i] + 1) / 2] for i in chosen])
    fixed, per_token, per_pair = np.linalg.solve(terms, np.array([prefill_seconds(model)[i] for i in chosen]))
    return Fitted(float(fixed), float(per_token), float(per_pair))


def _table3() -> list[Row]:
    """KV sizes are derived; no prefill time is printed, so three lengths are fitted and the fourth predicted."""
    rows = []
    for model, published in KV_THROUGHPUT.items():
        kv, cost = find_model(model).kv(), fitted(model)
        for name, tokens, rate in zip(NAMES, LENGTHS, published, strict=True):
            obtained = kv_throughput(float(kv.bytes_for(tokens)), cost.seconds(tokens)) * 8e-9
            kind: RowKind = "predicted" if name == "8K" else "calibrated"
            rows.append(Row("Table 3", f"{model}: KV throughput at {name}", "Gbit/s", rate, obtained, kind))
    return rows


def _egress() -> list[Row]:
    """Equation (2) on Table 3."""

    def demand(model: str, length: str, instances: int) -> float:
        return egress_demand(instances, KV_THROUGHPUT[model][NAMES.index(length)], 1.0)

    where = "Section 2.3"
    return [
        Row(where, "512 H200, MiniMax-M2.5 at 32K", "Tbit/s", 3.8, demand("MiniMax-M2.5", "32K", INSTANCES) / 1e3,
            "predicted"),
        Row(where, "512 H200, Qwen3-235B at 32K", "Tbit/s", 2.1, demand("Qwen3-235B", "32K", INSTANCES) / 1e3,
            "predicted"),
        Row(where, "512 H200, Ring-2.5-1T at 32K", "Gbit/s", 170, demand("Ring-2.5-1T", "32K", INSTANCES), "predicted"),
        Row(where, "512 H200, Ring-2.5-1T at 128K (below)", "Gbit/s", 100, demand("Ring-2.5-1T", "128K", INSTANCES),
            "predicted"),
        Row(where, "10,000 GPUs, Ring-2.5-1T at 128K", "Tbit/s", 1.8, demand("Ring-2.5-1T", "128K", 1250) / 1e3,
            "predicted"),
    ]  # fmt: skip


def _structure() -> list[Row]:
    """What KV is saved by, from configs alone."""
    ring = find_model("Ring-2.5-1T")
    kv = ring.kv()
    layers = sum(kv.layers.values())
    latent = 2 * (ring.config["kv_lora_rank"] + ring.config["qk_rope_head_dim"])
    grouped = 2 * 2 * 8 * ring.config["head_dim"]
    reason = (
        f"Ring's MLA keeps {latent:,} bytes a token and layer; 4.5 times as much is {4.5 * latent:,.0f}, which is no "
        f"GQA of whole heads of {ring.config['head_dim']}. With 8 KV heads, as in MiniMax-M2.5, it is {grouped:,}"
    )
    where = "Section 2.2"
    return [
        Row(where, "MiniMax-M2.5 by MiMo-V2-Flash at 32K", "times", 13, 59.93 / 4.66, "input"),
        Row(where, "Qwen3-235B by Qwen3.5-397B at 32K", "times", 4, 33.35 / 8.25, "input"),
        Row(where, "Ring-2.5-1T: layers by MLA layers", "times", 8, layers / kv.layers["full"], "predicted"),
        Row(where, "Ring-2.5-1T: GQA by MLA", "times", 4.5, grouped / latent, "predicted", reason),
        Row(where, "Ring-2.5-1T: both together", "times", 36, layers * grouped / kv.per_token, "predicted", reason),
    ]


def _table5() -> list[Row]:
    instance = find_instance("prfaas-1t-h200")
    profile = instance.profile()
    rows = []
    for name, tokens, published in zip(NAMES, LENGTHS, TABLE5_KV, strict=True):
        rows.append(Row("Table 5", f"KV at {name}", "MiB", published, profile.kv_bytes(tokens) / 2**20, "calibrated"))
    for name, tokens, seconds in zip(NAMES, LENGTHS, instance.seconds, strict=True):
        rows.append(Row("Table 5", f"prefill at {name}", "s", seconds, profile.prefill_seconds(tokens), "input"))
    for name, tokens, published in zip(NAMES, LENGTHS, TABLE5_THROUGHPUT, strict=True):
        obtained = kv_throughput(profile.kv_bytes(tokens), profile.prefill_seconds(tokens)) * 8e-9
        rows.append(Row("Table 5", f"KV throughput at {name}", "Gbit/s", published, obtained, "predicted"))
    return rows
