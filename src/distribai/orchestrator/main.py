"""One orchestrator process: start, serve, stop."""

from __future__ import annotations

from collections.abc import Callable

from distribai.config import OrchestratorSettings


class Orchestrator:
    """One orchestrator. ``operator_token`` is empty except at the first start of a grid."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        self.settings = settings
        self.grpc_address = ""
        self.http_address = ""
        self.join_link = ""
        self.operator_token = ""

    async def start(self) -> None:
        """Lock, migrate, listen, run the duties."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Tell the nodes to come back later, stop listening, let go of the database."""
        raise NotImplementedError


def run_orchestrator(
    settings: OrchestratorSettings, on_ready: Callable[[Orchestrator], None]
) -> int:
    """Run until SIGINT or SIGTERM; the exit status."""
    raise NotImplementedError
