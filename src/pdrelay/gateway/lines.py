"""What the gateway knows of the lines between clusters: configured, then measured by the depots."""

from __future__ import annotations

from collections.abc import Mapping

from pdrelay.cluster.config import Deployment
from pdrelay.cluster.units import parse_time
from pdrelay.depot.base import LinkEstimate, LinkState
from pdrelay.policy.base import LinkView

Ends = tuple[str, str]
"""Names of the source and the target."""


class Lines:
    """All lines of a deployment. Depots measure host by host; placement looks at clusters."""

    def __init__(self, deployment: Deployment) -> None:
        self._clusters = {host.name: host.cluster for host in deployment.host}
        self._configured = {
            (link.source, link.target): LinkView(link.first_rate, parse_time(link.rtt)) for link in deployment.link
        }
        self._down: dict[Ends, str] = {}  # by host: why
        self._estimates: dict[Ends, LinkEstimate] = {}  # by host
        self._views: dict[Ends, LinkView] = {}  # what follows from them; empty when it must be made again

    def state(self, host: str, state: LinkState) -> None:
        """The link from depot `host` came up or went down."""
        self._views = {}
        if state.up:
            self._down.pop((host, state.to), None)
        else:
            self._down[host, state.to] = state.detail or "no connection"

    def estimate(self, host: str, estimate: LinkEstimate) -> None:
        """What depot `host` measured."""
        self._views = {}
        self._estimates[host, estimate.to] = estimate

    def forget(self, host: str) -> None:
        """Depot `host` went away: it sends nothing any more."""
        self._views = {}
        for ends in [ends for ends in self._estimates if ends[0] == host]:
            del self._estimates[ends]

    def views(self) -> Mapping[Ends, LinkView]:
        """By (from, to) cluster."""
        if not self._views:
            self._views = {ends: self._view(ends, configured) for ends, configured in self._configured.items()}
        return self._views

    def rtt(self, source: str, target: str) -> float:
        """Seconds there and back between two clusters, in whatever direction there is a line; 0 without one."""
        views = self.views()
        view = views.get((source, target)) or views.get((target, source))
        return view.rtt if view is not None else 0.0

    def _view(self, ends: Ends, configured: LinkView) -> LinkView:
        measured = [found for hosts, found in self._estimates.items() if self._ends_of(hosts) == ends]
        if not measured:
            return configured._replace(down=self._trouble(*ends))
        return LinkView(
            # Hosts share the line: it carries at least what the fastest of them got, and all of their queues.
            rate=max(found.rate * found.ratio for found in measured),
            rtt=min(found.base_rtt for found in measured),
            down=self._trouble(*ends),
            queued=sum(found.queued for found in measured),
        )

    def _ends_of(self, hosts: Ends) -> Ends:
        return self._clusters.get(hosts[0], ""), self._clusters.get(hosts[1], "")

    def _trouble(self, source: str, target: str) -> str:
        """Why no host of cluster `source` reaches one of `target`; empty while some does."""
        pairs = [(a, b) for a in self._clusters for b in self._clusters if self._ends_of((a, b)) == (source, target)]
        reasons = [self._down.get(pair, "") for pair in pairs]
        return reasons[0] if reasons and all(reasons) else ""
