"""Which of a host's links go by NIXL, as the deployment file says, and whether they can."""

from __future__ import annotations

from collections.abc import Iterator

from pdrelay.cluster.config import Deployment
from pdrelay.cluster.topology import Host, Link
from pdrelay.depot.nixl.base import AgentListener, MakeAgent
from pdrelay.depot.nixl.process import AgentProcess, Settings
from pdrelay.errors import DepotError, StartError


def maker(link: Link, depot: str, arena_fd: int) -> MakeAgent:
    """Makes the agents of `link` at depot `depot`."""
    settings = Settings(link.nixl_backend, link.nixl_params, link.nixl_env)
    return lambda listener: AgentProcess(depot, settings, arena_fd, listener)


def writers(deployment: Deployment, host: Host) -> Iterator[tuple[str, Link]]:
    """The depots that write to `host` by NIXL."""
    for source in deployment.host:
        link = deployment.link_between(source.cluster, host.cluster)
        if link is not None and link.transport == "nixl" and source.name != host.name:
            yield source.name, link


async def require_nixl(deployment: Deployment, host: Host, arena_fd: int) -> None:
    """Starts an agent for each NIXL link of `host` and ends it. Raises StartError naming the link and the remedy."""
    for index, link in enumerate(deployment.link):
        if link.transport == "nixl" and host.cluster in (link.source, link.target):
            agent = maker(link, host.name, arena_fd)(_Silent())
            try:
                await agent.start()
            except DepotError as error:
                raise StartError(
                    f'link[{index}].transport: found "nixl", which does not work on host {host.name}: {error}; '
                    'put that right or set transport = "tcp"'
                ) from error
            finally:
                await agent.aclose()


class _Silent(AgentListener):
    """For an agent that is only started."""

    def written(self, batch: int) -> None:
        """See AgentListener."""

    def notified(self, note: bytes) -> None:
        """See AgentListener."""

    def broken(self, detail: str) -> None:
        """See AgentListener."""
