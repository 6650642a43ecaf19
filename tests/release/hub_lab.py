"""One publishing run inside a test: the real client against the hub of ``hub_server``, with a clock that does not wait."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cut_builder import Checkout
from hub_server import TOKEN, HubServer

from opencoti_build import release_layout
from opencoti_build.cache import Cache
from opencoti_build.console import Console, Mode
from opencoti_build.publish import cut, execute, plan
from opencoti_build.publish.execute import Result
from opencoti_build.publish.hub import Hub
from opencoti_build.publish.journal import Journal
from opencoti_build.publish.plan import Plan
from opencoti_build.publish.policy import Policy

POLICY = Policy(attempts=4, reply_timeout=5.0, connect_timeout=5.0, large=2000, parallel=2)


@dataclass
class Clock:
    """Notes what is waited for, and lets the time pass at once."""

    slept: list[float] = field(default_factory=list)
    time: float = 1_800_000_000.0
    on_sleep: Callable[[], object] = lambda: None

    def now(self) -> float:
        """Seconds since the epoch."""
        return self.time

    def sleep(self, seconds: float, stop: threading.Event) -> None:
        """Only note it."""
        self.slept.append(seconds)
        self.time += seconds
        self.on_sleep()


@dataclass
class Lab:
    """A hub, a cache, and what the runs said."""

    server: HubServer
    cache: Cache
    clock: Clock = field(default_factory=Clock)
    policy: Policy = POLICY
    token: str = TOKEN
    show: bool = True
    said: io.StringIO = field(default_factory=io.StringIO)

    @property
    def console(self) -> Console:
        """Everything that is said is kept."""
        return Console(self.said, mode=Mode.PLAIN)

    @property
    def journal(self) -> Journal:
        """The journal of the runs."""
        return Journal.of(self.cache, self.server.url, self.server.repository)

    def hub(self) -> Hub:
        """A gateway to the server."""
        return Hub(self.server.repository, endpoint=self.server.url, token=self.token, policy=self.policy, clock=self.clock)

    def plan(self, checkout: Checkout) -> Plan:
        """Only read."""
        with self.hub() as hub:
            return self._plan(hub, checkout)

    def _plan(self, hub: Hub, checkout: Checkout) -> Plan:
        layout = release_layout.load()
        release = cut.read(checkout.cut, checkout.root, layout, self.console)
        head = hub.head()
        return plan.make(release, hub.tree(head), head, layout, large=hub.policy.large)

    def publish(self, checkout: Checkout) -> Result:
        """What ``invoke publish --yes`` does."""
        with self.hub() as hub:
            planned = self._plan(hub, checkout)
            if self.show:
                planned.show(self.console, hub.repository)
            return execute.carry_out(hub, planned, self.journal, self.console)


def lab(server: HubServer, folder: Path) -> Lab:
    """A lab with an empty cache."""
    return Lab(server, Cache(folder / "cache"))
