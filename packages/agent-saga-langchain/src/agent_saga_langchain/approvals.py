"""The seam through which a graph asks a person: before each IRREVERSIBLE call, also before one that will be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from hashlib import sha256
from typing import Any, Final

from agent_saga_core import ActionSemantics, Saga, StepRequest, values
from agent_saga_core.wrapping import CallSite, ToolRunner
from agent_saga_langchain.places import ordinal

__all__ = ["ASK", "Ask", "approval"]

Ask = Callable[[StepRequest], bool]

ASK: Final[ContextVar[Ask | None]] = ContextVar("agent_saga_langchain_ask", default=None)
"""Asked on the caller's own thread before each IRREVERSIBLE call in a saga; its answer is the approval of that call.

It is asked always: also when the step is done already and will give back its record, and when it goes on after a pause.
LangGraph matches answers to questions by the number of the question within a task, so a question left out would hand
its answer to the next one. What it raises passes through, and then there is no step.

The request's `token` names the saga, the tool, the arguments (secrets aside) and the call; it is the same each time the
call is made again, and no other call has it. It is not the token of the request that the saga's own `approve=` gets.
"""


def approval(
    runner: ToolRunner, saga: Saga, args: Mapping[str, Any], site: CallSite | None
) -> Callable[[StepRequest], bool] | None:
    """Ask, if somebody is there to be asked; the answer as a gate for the step, None to leave it to the saga's own."""
    ask = ASK.get()
    spec = runner.spec
    if ask is None or spec.semantics is not ActionSemantics.IRREVERSIBLE:
        return None
    given = {name: value for name, value in args.items() if name != "idempotency_key"}
    try:
        encoded = values.encode_args(given, spec.hints)
    except values.Unstorable:  # the step is refused for that, this time and every time
        return None
    parts: list[Any] = [saga.id, spec.tool, values.fingerprint(spec.tool, encoded.data), *_identity(saga, spec.tool, site)]
    request = StepRequest(
        saga_id=saga.id,
        tool=spec.tool,
        args=values.display(encoded.data),
        semantics=spec.semantics,
        token=sha256(values.json_bytes(parts)).hexdigest()[:32],
    )
    answer = ask(request)
    return lambda _: answer


def _identity(saga: Saga, tool: str, site: CallSite | None) -> list[Any]:
    if site is not None and site.call_id is not None:
        return [site.adapter, site.scope, site.call_id]
    # A question that was asked before is asked again in the next execution of the body, where it has the same number.
    adapter, scope, body = (site.adapter, site.scope, site.body) if site is not None else ("", "", None)
    return [adapter, scope, "n", ordinal(saga, object(), "asked", body, scope, tool)]
