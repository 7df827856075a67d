"""`pdrelay study`: one file a study, imported only when it runs."""

from __future__ import annotations

from pdrelay.cli.lazy import LazyGroup

COMMANDS = {
    "pairing": "Which chip prefills and which decodes at the least cost, and at which prices that changes.",
    "lines": "How thin the line, how far the datacenters and how dear a byte before offload stops paying.",
}
"""Study to its line in `pdrelay study --help`; the code is in `pdrelay.cli.study.<name>`."""

command = LazyGroup(
    "study",
    table=COMMANDS,
    package="pdrelay.cli.study",
    help="Questions beyond the papers' tables, answered by the planner's model.",
)
