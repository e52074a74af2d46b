"""A person's yes for an IRREVERSIBLE call, asked for through LangGraph's `interrupt()`.

What the person sees is plain data. The answer names the call it is for by a token, made of the saga, the call and its
arguments: an answer to another call, to other arguments, or from before a time travel is not taken for one, and the
question is asked again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from hashlib import sha256
from typing import Any, Final, cast

from langgraph.types import Interrupt, interrupt

from agent_saga_core import Saga, StepRequest, values
from agent_saga_core.declare import StepSpec
from agent_saga_core.wrapping import CallSite
from agent_saga_langchain.places import current_task

__all__ = ["APPROVAL", "Gate", "approve", "question", "reject"]

APPROVAL: Final = "agent_saga.approval"
"""The `kind` of an interrupt that asks for a yes."""


def approve(question: Any) -> dict[str, Any]:
    """The answer that lets the call of this question happen: `Command(resume=approve(question))`.

    Args:
        question: The interrupt, or its value.

    Raises:
        ValueError: It does not ask for an approval.
    """
    return {"token": _token(question), "approved": True}


def reject(question: Any, reason: str = "") -> dict[str, Any]:
    """The answer that forbids the call of this question; the tool raises `ApprovalRequired` and nothing happens.

    Args:
        question: The interrupt, or its value.
        reason: For the log of conversations; the model hears it where the framework tells it of errors.

    Raises:
        ValueError: It does not ask for an approval.
    """
    answer: dict[str, Any] = {"token": _token(question), "approved": False}
    return {**answer, "reason": reason} if reason else answer


def question(spec: StepSpec, saga: Saga, args: Mapping[str, Any], site: CallSite) -> StepRequest | None:
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
    call = site.call_id
    told = call if call is not None else saga.shared(_Asked).next(site.body, site.scope, spec.tool)
    parts: list[Any] = [
        saga.id, site.adapter, site.scope, spec.tool, told, values.fingerprint(spec.tool, encoded.data)
    ]  # fmt: skip
    return StepRequest(
        saga_id=saga.id,
        tool=spec.tool,
        args=values.display(encoded.data),
        semantics=spec.semantics,
        token=sha256(values.json_bytes(parts)).hexdigest()[:32],
    )


class _Asked:
    """The questions about calls without an id that one opening of a saga has asked, counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Hashable, str, str]] = Counter()

    def next(self, body: Hashable, scope: str, tool: str) -> int:
        """The number of this question among those of its kind in one execution of a body, from 0."""
        with self._lock:
            number = self._counts[body, scope, tool]
            self._counts[body, scope, tool] = number + 1
            return number


class Gate:
    """Asks in the task that makes the call. One for each run.

    LangGraph gives the answers of one task to its `interrupt()` calls by their order, and parallel calls of one task
    have none: an answer that another call of this task is waiting for is kept for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, int, str], bool] = {}

    def __call__(self, request: StepRequest) -> bool:
        """Whether a person has said yes to exactly this call. Raises LangGraph's interrupt until one has answered.

        Raises:
            RuntimeError: Not in a task of a graph, where nobody can be asked.
        """
        task = current_task()
        if task is None:
            raise RuntimeError("There is no LangGraph task here to ask in. Open the saga with approve=.")
        # Each attempt of a task asks its questions again, in their order.
        here = (task.task_id, task.runtime.execution_info.node_attempt)
        asked = _shown(request)
        with self._lock:
            while (*here, request.token) not in self._answers:
                token, said = _read(interrupt(asked))
                if token is not None:
                    self._answers[*here, token] = said
                if token != request.token:
                    asked = {**_shown(request), "note": "The last answer was for another call."}
            return self._answers[*here, request.token]


def _shown(request: StepRequest) -> dict[str, Any]:
    return {
        "kind": APPROVAL,
        "tool": request.tool,
        "args": request.args,
        "semantics": str(request.semantics.value),
        "saga_id": request.saga_id,
        "token": request.token,
    }


def _read(answer: object) -> tuple[str | None, bool]:
    """The token of an answer and whether it is a yes; (None, False) for what is no answer to an approval."""
    if not isinstance(answer, Mapping):
        return None, False
    given = cast("Mapping[str, Any]", answer)
    token = given.get("token")
    return (token, given.get("approved") is True) if isinstance(token, str) else (None, False)


def _token(question: Any) -> str:
    value: Any = question.value if isinstance(question, Interrupt) else question
    asked: dict[str, Any] = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}
    token = asked.get("token")
    if asked.get("kind") == APPROVAL and isinstance(token, str):
        return token
    raise ValueError(f"This does not ask for an approval. Pass an interrupt of kind {APPROVAL!r}, or its value.")
