"""`pdrelay bench`: one file a benchmark, imported only when it runs."""

from __future__ import annotations

from pdrelay.cli.lazy import LazyGroup

COMMANDS = {
    "all": "Run the short form of everything, and write JSON and one page.",
    "serve": "Play a workload on any OpenAI endpoint: latencies from the moment at which a request was due.",
    "validate": "Play the same requests on a deployment and in the simulator: how far the simulator is off.",
    "handoff": "Hand requests over from relay to main decode: pauses that a reader sees, and what the switch costs.",
    "transfer": "Move KV between two depots, beside other tools and beside the published measurement.",
    "compare": "Serve the same requests under each policy over a shaped line: what relay decode buys and costs.",
    "gateway": "Relay token streams through the gateway, beside other gateways and routers.",
    "planner": "Time the planner: the grid of PrfaaS's Table 6, and a plan over 1,000 instances.",
    "codec": "Encode the KV of a real model for slow lines: ratio, speed, effect on output.",
}
"""Benchmark to its line in `pdrelay bench --help`; the code is in `pdrelay.cli.bench.<name>`."""

command = LazyGroup(
    "bench", table=COMMANDS, package="pdrelay.cli.bench", help="Measure. Every benchmark takes --json and --quick."
)
