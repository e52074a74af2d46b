"""A person's yes for an IRREVERSIBLE call, asked for through LangGraph's `interrupt()`.

What the person sees is plain data. The answer names the call it is for by a token, made of the saga, the call and its
arguments: an answer to another call, to other arguments, or from before a time travel is not taken for one, and the
question is asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, cast

from langgraph.types import Interrupt, interrupt

from agent_saga_core import StepRequest
from agent_saga_langchain.places import current_task

__all__ = ["APPROVAL", "Gate", "approve", "reject"]

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
        question = _question(request)
        with self._lock:
            while (*here, request.token) not in self._answers:
                token, said = _read(interrupt(question))
                if token is not None:
                    self._answers[*here, token] = said
                if token != request.token:
                    question = {**_question(request), "note": "The last answer was for another call."}
            return self._answers[*here, request.token]


def _question(request: StepRequest) -> dict[str, Any]:
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
