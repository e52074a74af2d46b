"""`recover --watch --metrics`: what the daemon sees and does, as Prometheus text. A scrape never touches the log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Self, get_args

from agent_saga_core.cli.failures import Complaint
from agent_saga_core.cli.screen import plain
from agent_saga_core.recovery import Recoverer, Standing

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["Metrics", "address_of"]

LOCAL: Final = "127.0.0.1"
_ADDRESS: Final = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:\s]+):)?(?P<port>[0-9]{1,5})", re.ASCII)


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `[HOST:]PORT`. Port 0 is one that is free.

    Raises:
        Complaint: It is neither.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise Complaint(f"--metrics takes [HOST:]PORT, such as 9464 or 0.0.0.0:9464, not {plain(text)!r}")
    return (found["host"] or LOCAL).strip("[]"), int(found["port"])


class Metrics(AbstractContextManager["Metrics"]):
    """Serves the numbers of a recoverer, on threads of its own, while it is open.

    Everything that is served is in memory: labels are names of compensators that are registered here, statuses and
    outcomes, never an id of a saga or anything that a tool was given.

    Attributes:
        url: Where they are served.

    Args:
        where: `[HOST:]PORT`.
        recoverer: Whose numbers.
        reachable: Whether its log could be used when it was last tried; None while it was not.

    Raises:
        Complaint: The address is none, or taken, or the extra is missing.
    """

    def __init__(self, where: str, recoverer: Recoverer, reachable: Callable[[], bool | None]) -> None:
        host, port = address_of(where)
        self._recoverer = recoverer
        self._reachable = reachable
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError as error:
            raise Complaint("--metrics needs an extra: pip install 'agent-saga-core[metrics]'") from error
        registry = CollectorRegistry(auto_describe=False)  # our own: nothing of other code of this process is shown
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise Complaint(
                f"--metrics cannot listen on {plain(where)}: {error.strerror or error}; name a free address"
            ) from error
        bound: Any = self._server.server_address
        self.url: Final = f"http://{f'[{host}]' if ':' in host else host}:{bound[1]}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def collect(self) -> Iterator[Metric]:
        """The numbers at this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        numbers = self._recoverer.tally.numbers()
        backlog = GaugeMetricFamily(
            "agent_saga_unfinished_sagas",
            "Sagas that have not ended, by how they stood at the last look.",
            labels=["status"],
        )
        for standing in get_args(Standing):
            backlog.add_metric([standing], numbers.backlog.get(standing, 0))
        yield backlog
        age = 0.0 if numbers.oldest is None else max(0.0, time.time() - numbers.oldest)
        yield GaugeMetricFamily(
            "agent_saga_oldest_unfinished_age_seconds", "Age of the oldest saga that has not ended; 0 if all have.", age
        )
        done = CounterMetricFamily(
            "agent_saga_compensations",
            "Calls of compensators, by how they ended: compensated, failed (and tried again), given_up.",
            labels=["handler", "outcome"],
        )
        for (handler, outcome), count in sorted(numbers.compensations.items()):
            done.add_metric([handler, outcome], count)
        yield done
        yield CounterMetricFamily(
            "agent_saga_recovered_sagas", "Sagas that were rolled back to their end.", numbers.recovered
        )
        yield CounterMetricFamily(
            "agent_saga_recovery_rounds", "Looks at the whole log that came to their end.", numbers.rounds
        )
        yield GaugeMetricFamily(
            "agent_saga_log_up",
            "1 if the log could be used when it was last tried, else 0.",
            int(self._reachable() is True),
        )
        failing = self._recoverer.backoff.failing()
        yield GaugeMetricFamily(
            "agent_saga_backing_off_handlers",
            "Compensators that fail, so that sagas which need them wait.",
            len(failing),
        )
        failures = GaugeMetricFamily(
            "agent_saga_handler_failures",
            "Calls of a compensator that failed since it last worked, as far as this process knows; 256 at most.",
            labels=["handler"],
        )
        for handler in sorted(self._recoverer.backoff.known()):
            failures.add_metric([handler], failing.get(handler, 0))
        yield failures
