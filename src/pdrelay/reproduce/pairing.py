"""Which chip prefills and which decodes at the least cost, and the prices at which that changes.

Chips of PDD's Table 1 beside H100, H200 and H20, each in each role, under the conditions of that table: 64K tokens of
prompt of which 90 % are cached, 512 tokens of output. Table 1 was measured under the service level, so no further limit
is put on the batch. Without a limit on instances the cost of a request is the sum of what each role costs, so a pairing
wins by its roles, and each chip has a price at which it would.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from pdrelay.perf.batch import Decoding, full_rate, largest_batch
from pdrelay.perf.catalog import chips, find_chip, find_model
from pdrelay.perf.hardware import Chip
from pdrelay.perf.instance import InstanceProfile
from pdrelay.perf.roofline import Weights, roofline
from pdrelay.ui.bars import bar_chart
from pdrelay.ui.charts import Axis, Series, line_chart
from pdrelay.ui.page import Section, Table, page

MODEL = "GLM5"
CHIPS = 16
"""Of an instance: the model's weights do not fit into fewer H100."""

PROMPT, CACHED, OUTPUT = 64_000, 57_600, 512
HOUR = 3600.0
ROLES = ("prefill", "decode")

ASSUMED = (
    "Prices of A to E are assumed (perf/data/chips.toml), and so are all rates of B and D: PDD prints neither. What "
    "holds whatever the prices are is the break-even column.",
    "H100, H200 and H20 are rooflines (40 % of the peak FLOP/s, 60 % of the bandwidth); A, C and E are Table 1's "
    "shares of H100, with its memory. A and E were measured with GLM5, C with GLM4.7; all are applied to GLM5 here.",
)


class InRole(NamedTuple):
    """A chip in a role: what a request costs there, and the chip's price at which it would be the cheapest."""

    chip: str
    role: str
    price: float  # of one chip and hour, H100 = 1
    cost: float  # of 1,000 requests
    break_even: float  # price of one chip and hour, the others' kept
    assumed_rate: bool


class Pair(NamedTuple):
    """A chip for each role."""

    prefill: str
    decode: str
    cost: float  # of 1,000 requests


class Pairing(NamedTuple):
    """All pairs, cheapest first, and each chip in each role."""

    roles: list[InRole]
    pairs: list[Pair]

    def cost(self, chip: str, role: str) -> float:
        """Of 1,000 requests."""
        return next(each.cost for each in self.roles if (each.chip, each.role) == (chip, role))

    def homogeneous(self) -> Pair:
        """The cheapest pair of one chip."""
        return next(pair for pair in self.pairs if pair.prefill == pair.decode)


def study(*, assumed: bool = False) -> Pairing:
    """Costs of every chip in every role, and of every pair; with `assumed`, of chips B and D, too."""
    able = [chip for chip in chips() if assumed or not any(_assumed(chip.name, role) for role in ROLES)]
    hours = {(chip.name, role): _hours(chip, role) for chip in able for role in ROLES}
    prices = {chip.name: chip.price.value for chip in able}
    roles = []
    for (name, role), each in hours.items():
        others = min(prices[other] * h for (other, r), h in hours.items() if r == role and other != name)
        roles.append(InRole(name, role, prices[name], 1000 * prices[name] * each, others / each, _assumed(name, role)))
    costs = {(each.chip, each.role): each.cost for each in roles}
    pairs = [Pair(p, d, costs[p, "prefill"] + costs[d, "decode"]) for p in prices for d in prices]
    return Pairing(roles, sorted(pairs, key=lambda pair: pair.cost))


def _hours(chip: Chip, role: str) -> float:
    """Chip hours that a request takes."""
    profile = profile_of(chip.name)
    if role == "prefill":
        return profile.prefill_seconds(PROMPT - CACHED, CACHED) * CHIPS / HOUR
    work = Decoding(OUTPUT - 1, PROMPT + OUTPUT / 2, PROMPT)
    return CHIPS / full_rate(profile, work, largest_batch(profile, work)) / HOUR


@cache
def profile_of(chip: str) -> InstanceProfile:
    """An instance of the model on `CHIPS` of a chip."""
    found = find_chip(chip)
    if found.prefill is not None and found.decode is not None:
        return profile_of(found.relative_to).scaled(chip, found.prefill.value, found.decode.value)
    model = find_model(MODEL)
    kv = model.kv()
    heads, head = model.config["num_attention_heads"], model.config["kv_lora_rank"]
    weights = Weights(model.total.value, model.active.value, 1.0, 4.0 * heads * head * kv.layers["full"])
    return roofline(chip, kv, weights, found, CHIPS)


def _assumed(chip: str, role: str) -> bool:
    rate = getattr(find_chip(chip), role)
    return rate is not None and rate.kind == "assumed"


# ---- what is shown ----


def flips(found: Pairing) -> list[str]:
    """The winner, by how much, and where each of its chips stops winning."""
    best, alone = found.pairs[0], found.homogeneous()
    other = next(pair for pair in found.pairs if not {pair.prefill, pair.decode} & {best.prefill, best.decode})
    sentences = [
        f"{best.prefill} for prefill and {best.decode} for decode wins: 1,000 requests cost {best.cost:.3f}, "
        f"{1 - best.cost / alone.cost:.1%} less than {alone.prefill} alone, the best of one chip, and "
        f"{1 - best.cost / other.cost:.1%} less than {other.prefill} with {other.decode}, the best without either"
    ]
    for role, chip in (("prefill", best.prefill), ("decode", best.decode)):
        mine = next(each for each in found.roles if (each.chip, each.role) == (chip, role))
        rest = min((e for e in found.roles if e.role == role and e.chip != chip), key=lambda e: e.cost)
        sentences.append(
            f"{role}: {chip} is the cheapest up to {mine.break_even:.2f} of an H100's price (it is taken at "
            f"{mine.price:.2f}); above that {rest.chip} is"
        )
    ratio = found.cost(best.prefill, "decode") / found.cost(best.decode, "decode")
    price = next(e.price for e in found.roles if e.chip == best.decode) / next(
        e.price for e in found.roles if e.chip == best.prefill
    )
    sentences.append(
        f"{best.decode} beside {best.prefill} stops paying when it costs more than {price * ratio:.2f} times as much "
        f"as {best.prefill} (it is taken at {price:.2f} times): then {best.prefill} decodes as cheaply itself"
    )
    return sentences


def role_table(found: Pairing) -> Table:
    """Each chip in each role, cheapest first."""
    rows = [
        (f"{e.chip}{' (rate assumed)' if e.assumed_rate else ''}", e.role, f"{e.price:.2f}", f"{e.cost:.3f}",
         f"{e.break_even:.2f}", "wins" if e.break_even > e.price else f"wins below {e.break_even / e.price:.0%}")
        for e in sorted(found.roles, key=lambda e: (e.role != "prefill", e.cost))
    ]  # fmt: skip
    return Table(("chip", "role", "price", "cost of 1,000 requests", "break-even price", "of its price"), rows)


def pair_table(found: Pairing, shown: int = 12) -> Table:
    """The cheapest pairs, beside one chip alone."""
    alone = found.homogeneous().cost
    rows = [(f"{p.prefill} + {p.decode}", f"{p.cost:.3f}", f"{p.cost / alone - 1:+.1%}") for p in found.pairs[:shown]]
    return Table(("prefill + decode", "cost of 1,000 requests", "against the best chip alone"), rows)


def html(known: Pairing, every: Pairing) -> str:
    """A page in one file: chips with known rates, then with B and D."""
    return page(
        "Hardware pairing: which chip for which role",
        [
            Section("Chips whose rates are known", [pair_table(known)], _charts(known), flips(known)),
            Section("With B and D, whose rates are assumed", [pair_table(every, 6)], notes=flips(every)[:1]),
            Section("Each chip in each role", [role_table(every)]),
            Section("What is assumed", notes=ASSUMED),
        ],
    )


def _charts(found: Pairing) -> list[tuple[str, str]]:
    groups = [(f"{p.prefill} + {p.decode}", (p.cost,)) for p in found.pairs[:16]]
    return [
        ("Cost of 1,000 requests by pair", bar_chart(groups, ("cost",), "cost of 1,000 requests, H100 hours")),
        ("Cost by the price of the winning decode chip", _flip_chart(found)),
    ]


def _flip_chart(found: Pairing) -> str:
    """Best pairs with and without the winning decode chip, as its price changes."""
    best = found.pairs[0]
    price = next(each.price for each in found.roles if each.chip == best.decode)
    own, prefill = found.cost(best.decode, "decode"), found.cost(best.prefill, "prefill")
    without = min(pair.cost for pair in found.pairs if pair.decode != best.decode)
    factors = [0.25 * 1.1**i for i in range(32)]
    series = [
        Series(f"{best.prefill} + {best.decode}", [(price * f, prefill + own * f) for f in factors]),
        Series(f"best without {best.decode} for decode", [(price * f, without) for f in factors], dashed=True),
        Series(f"{best.prefill} alone", [(price * f, _alone(found, best.prefill)) for f in factors], dashed=True),
    ]
    return line_chart(
        series, Axis(f"price of {best.decode}, H100 = 1", least=0), Axis("cost of 1,000 requests", least=0)
    )


def _alone(found: Pairing, chip: str) -> float:
    """Cost of 1,000 requests of one chip in both roles."""
    return found.cost(chip, "prefill") + found.cost(chip, "decode")


def as_dict(found: Pairing) -> dict[str, Any]:
    """For JSON."""
    return {
        "roles": [each._asdict() for each in found.roles],
        "pairs": [pair._asdict() for pair in found.pairs],
        "sentences": flips(found),
    }
