"""Recovery: finish dead processes' sagas from the log alone, with the engine's own rollback.

`recover` looks at every unfinished saga, leaves alone what is owned, suspended or young, claims the rest and rolls it
back through compensators registered by name. `resolve` is how a person says what became of a step. A `Recoverer` is
one process of a fleet that does so round by round.
"""

from agent_saga_core.recovery.driving import arecover, recover, recover_as
from agent_saga_core.recovery.job import Standing
from agent_saga_core.recovery.recoverer import Heard, Recoverer
from agent_saga_core.recovery.report import RecoveryReport, list_sagas, read_saga
from agent_saga_core.recovery.resolving import resolve

__all__ = [
    "Heard",
    "Recoverer",
    "RecoveryReport",
    "Standing",
    "arecover",
    "list_sagas",
    "read_saga",
    "recover",
    "recover_as",
    "resolve",
]
