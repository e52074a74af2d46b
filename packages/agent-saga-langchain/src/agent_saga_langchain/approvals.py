"""The seam through which a graph asks a person before each IRREVERSIBLE call, also before one that will be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from hashlib import sha256
from typing import Any, Final

from agent_saga_core import ActionSemantics, Saga, StepRequest, values
from agent_saga_core.declare import StepSpec
from agent_saga_core.wrapping import CallSite
from agent_saga_langchain.places import ordinal

__all__ = ["ASK", "Ask", "approval", "question"]

Ask = Callable[[StepRequest], bool]

ASK: Final[ContextVar[Ask | None]] = ContextVar("agent_saga_langchain_ask", default=None)
"""Asked on the caller's own thread before each IRREVERSIBLE call in a saga; its answer is the approval of that call.

It is asked always: also when the step is done already and will give back its record, and when it goes on after a pause.
LangGraph matches answers to questions by the number of the question within a task, so a question left out would hand
its answer to the next one. What it raises passes through, and then there is no step.
"""


def approval(
    spec: StepSpec, saga: Saga, args: Mapping[str, Any], site: CallSite | None
) -> Callable[[StepRequest], bool] | None:
    """Ask, if somebody is there to be asked; the answer as a gate for the step, None to leave it to the saga's own."""
    ask = ASK.get()
    if ask is None or spec.semantics is not ActionSemantics.IRREVERSIBLE:
        return None
    request = question(spec, saga, args, site)
    if request is None:
        return None
    answer = ask(request)
    return lambda _: answer


def question(spec: StepSpec, saga: Saga, args: Mapping[str, Any], site: CallSite | None) -> StepRequest | None:
    """What a person is asked about a call that is about to be made; None if the step will refuse its arguments.

    Its token names the saga, the tool, the arguments (secrets aside) and the call. It is the same each time the call is
    made again, and no other call has it. It is not that of the request which the saga's own `approve=` gets. Made once
    for each call: calls without an id are counted here.
    """
    given = {name: value for name, value in args.items() if name != "idempotency_key"}
    try:
        encoded = values.encode_args(given, spec.hints)
    except values.Unstorable:
        return None
    adapter, scope, body = (site.adapter, site.scope, site.body) if site is not None else ("", "", None)
    call_id = site.call_id if site is not None else None
    call = call_id if call_id is not None else ordinal(saga, body, "asked", scope, spec.tool)
    parts: list[Any] = [saga.id, adapter, scope, spec.tool, call, values.fingerprint(spec.tool, encoded.data)]
    return StepRequest(
        saga_id=saga.id,
        tool=spec.tool,
        args=values.display(encoded.data),
        semantics=spec.semantics,
        token=sha256(values.json_bytes(parts)).hexdigest()[:32],
    )
