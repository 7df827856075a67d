"""`pdrelay reproduce`: one file a paper, imported only when it runs."""

from __future__ import annotations

from pdrelay.cli.lazy import LazyGroup

COMMANDS = {
    "pdd": "PDD: Tables 2, 4, 5, 7 and 8, Figures 7 and 8, simulated.",
    "prfaas": "PrfaaS: Tables 3, 5 and 6, egress, Figures 5a and 5b, by the throughput model.",
}
"""Paper to its line in `pdrelay reproduce --help`; the code is in `pdrelay.cli.reproduce.<name>`."""

command = LazyGroup(
    "reproduce",
    table=COMMANDS,
    package="pdrelay.cli.reproduce",
    help="Compare published figures with those that we obtain.",
)
