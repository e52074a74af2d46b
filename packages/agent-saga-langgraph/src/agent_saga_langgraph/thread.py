"""Which saga a run of a thread belongs to: read from the thread's checkpoints before anything runs.

The saga's id stands in the metadata of every checkpoint that its run wrote, and in a claim of the one that it began at
if another run had written that. `update_state` writes checkpoints without either, so a person's edit is followed back
to the checkpoint that was edited. LangGraph gives the tasks of an edited checkpoint new ids and runs them again, those
that had finished included: `Standing.renamed` says which task each of them was, so that a call met again is known as
the same one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from langchain_core.runnables.config import merge_configs
from langgraph.types import Command

from agent_saga_core import SagaNotFound, SagaStatus, current_saga, read_saga
from agent_saga_core.errors import DeclarationError, SagaBusy
from agent_saga_core.log.base import Log
from agent_saga_core.logs import shared_log
from agent_saga_core.saga import Saga
from agent_saga_langchain.places import current_task
from agent_saga_langgraph.claims import Claim, claim, latest_claim, saved, talk
from agent_saga_langgraph.looking import Look, Read

__all__ = ["ADDRESS", "Head", "Standing", "own_head", "paused", "stand", "unbound"]

log = logging.getLogger("agent_saga")

ADDRESS = ("checkpoint_id", "checkpoint_ns", "checkpoint_map")
"""The parts of a config that address one checkpoint of a thread."""
LENT = "__pregel_checkpointer"
"""Where a config has the checkpointer that somebody else lends to the graph."""
UPDATE, FORK = "update", "fork"
"""What LangGraph calls the sources of checkpoints that `update_state` wrote; a run may write forks, too."""


class Head(NamedTuple):
    """What the head of a thread was when it was looked at."""

    checkpoint_id: str | None
    talk: tuple[str, ...]
    """The questions that wait there, and the answers that were given."""
    claim: Claim


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a run stands in its thread.

    Attributes:
        config: What to run the graph with.
        thread: The config of the thread's head; None if the graph keeps no checkpoints of this run.
        saga_id: The saga's id; None to draw one.
        resumes: Whether the run goes on with a saga that was begun before.
        head: The head, if the run goes on there; None for new input, for a fork, and where nothing is kept.
        named: The saga that the head's own metadata or its claim names.
        forked: What a new saga stores of where it was forked from.
        renamed: The ids that tasks of an edited checkpoint have now, with those that they had.
    """

    config: dict[str, Any]
    thread: dict[str, Any] | None = None
    saga_id: str | None = None
    resumes: bool = False
    head: Head | None = None
    named: str | None = None
    forked: Mapping[str, Any] = field(default_factory=dict[str, Any])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])


def stand(
    graph: Any, given: Any, config: Mapping[str, Any] | None, saga_id: str | None, kept: Log | str | None
) -> Look[Standing]:
    """Find the saga that this input belongs to. Nothing has run when this raises.

    Args:
        graph: The compiled graph.
        given: Its input.
        config: The config that it is to run with.
        saga_id: The id that the caller names, if any.
        kept: Where the sagas are: a log, its URL, or None for the default.

    Raises:
        DeclarationError: An answer for a checkpoint that the thread has moved past; a saga id that is not the
            thread's; an edit after which finished work would be done again; a graph that would run as a part of the
            one around it.
        SagaNotFound: The thread's saga is not in this log.
    """
    own: dict[str, Any] = dict(config or {})
    thread = _thread_of(graph, own)
    if thread is None:
        return Standing(config=own, saga_id=saga_id)
    head = yield _state(graph, thread)
    conf = _conf(own)
    addressed = conf.get("checkpoint_id")
    at_head = not conf.get("checkpoint_ns") and addressed in (None, _id_of(head))
    command = cast("Command[Any] | None", given if isinstance(given, Command) else None)
    resuming = given is None or command is not None or _is_same_run(graph, own, head)
    if command is not None and command.resume is not None and not at_head:
        raise DeclarationError(
            "This answer is for a checkpoint that the thread has moved past, and LangGraph would give the tool the "
            "answer that is stored there, not this one. Fork first: saga_run(graph, None, old_config) asks again, in "
            "a saga of its own; then answer that."
        )
    if not at_head:
        yield from _warn_of_open(graph, thread, head)
        forked = yield from _origin(graph, thread, conf, addressed)
        return Standing(config=own, thread=thread, saga_id=saga_id, forked=forked)
    if not resuming:
        yield from _warn_of_open(graph, thread, head)
        return Standing(config=own, thread=thread, saga_id=saga_id)
    # With the head's own id LangGraph would run finished tasks again, under new ids; without it, it resumes.
    own = {**own, "configurable": _without_address(own)}
    standing = Standing(config=own, thread=thread, saga_id=saga_id)
    if head.metadata is None:
        return standing
    seen = yield from _seen(graph, thread, head)
    standing = replace(standing, head=seen, named=_named(head, seen.claim))
    works = command is not None and command.resume is None
    return (yield from _resumed(graph, head, standing, kept, works))


def _resumed(graph: Any, head: Any, standing: Standing, kept: Log | str | None, works: bool) -> Look[Standing]:
    """A run that goes on at the head: with the saga found there, or with a new one where that has ended.

    `works`: the input is a `Command` that is no answer, and gives a finished thread something to do.
    """
    owner, found = yield from _owner(graph, standing.thread, head)
    if owner is None or found is None:
        return standing  # what ran here before was no saga
    edited = owner is not head or _is_update(head)
    forked = {"forked_from": found, "forked_at": _id_of(owner)}
    if edited and not (yield from _is_last(graph, standing, owner, found)):
        return replace(standing, forked=forked)
    outer = current_saga()
    if outer is None:
        status = yield from _status(kept, found)
        if (edited or works) and status is SagaStatus.COMMITTED:
            return replace(standing, forked=forked)
        if standing.saga_id not in (None, found):
            if status in (SagaStatus.COMMITTED, SagaStatus.ROLLED_BACK):
                return replace(standing, forked=forked)
            raise DeclarationError(
                f"This thread's saga is {found!r}, {status}, and the run names {standing.saga_id!r}. Leave saga_id out."
            )
    renamed = yield from _renamed(graph, standing, head)
    return replace(standing, saga_id=found, resumes=True, renamed=renamed)


def unbound(graph: Any, config: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, Any] | None]:
    """A graph that is bound to a thread or a checkpoint as one that is not, and a config which says the same.

    LangGraph forks wherever the config has an address, even one that says None, so that it has to be taken off. Older
    versions forget what a graph is bound to where the config has anything configurable.
    """
    bound: Mapping[str, Any] = getattr(graph, "config", None) or {}
    if not _conf(bound):
        return graph, config
    own: dict[str, Any] = {**(config or {})}
    own["configurable"] = {**_conf(bound), **_conf(own)}
    if any(name in ADDRESS for name in _conf(bound)):
        graph = graph.copy({"config": {**bound, "configurable": _without_address(bound)}})
    return graph, own


def own_head(graph: Any, standing: Standing, saga: Saga) -> Look[None]:
    """Look at the head once more, now that nobody else can open the saga; let it name this saga if it does not.

    Raises:
        SagaBusy: The thread has moved on since it was looked at, or another saga goes on there.
    """
    if standing.head is None:
        return
    head = yield _state(graph, standing.thread)
    seen = yield from _seen(graph, standing.thread, head)
    had = seen == standing.head
    if had and standing.named != saga.id and not (standing.resumes and _is_update(head)):
        had = yield from claim(_saver_of(graph, standing.thread), head.config, seen.claim.number + 1, saga.id)
    if not had:
        raise SagaBusy(
            f"Another run has taken this thread further while this one was about to go on in saga {saga.id!r}. "
            "Look at the thread's state again, and answer what it asks now.",
            saga_id=saga.id,
        )


def paused(graph: Any, standing: Standing) -> Look[tuple[str, ...] | None]:
    """What the thread's run waits at, as names of nodes; None if the thread's state shows nothing.

    It does not show tasks that a `Command` has brought to a finished run. Older versions of LangGraph leave a task that
    asks its second question out of `next`.
    """
    head = yield _state(graph, standing.thread)
    return tuple(head.next) or tuple(task.name for task in head.tasks if task.interrupts) or None


# --- what is read


def _state(graph: Any, config: Any, *, subgraphs: bool = False) -> Read:
    return Read(
        lambda: graph.get_state(config, subgraphs=subgraphs), lambda: graph.aget_state(config, subgraphs=subgraphs)
    )


def _history(graph: Any, config: Any, saga_id: str) -> Read:
    def now() -> Any:
        found = graph.get_state_history(config, filter={"saga_id": saga_id})
        return next((state for state in found if not _is_update(state)), None)

    async def on_loop() -> Any:
        async for state in graph.aget_state_history(config, filter={"saga_id": saga_id}):
            if not _is_update(state):
                return state
        return None

    return Read(now, on_loop)


def _status(kept: Log | str | None, saga_id: str) -> Look[SagaStatus]:
    def read() -> SagaStatus:
        return read_saga(shared_log(kept), saga_id).status

    try:
        status: SagaStatus = yield Read(read, lambda: asyncio.to_thread(read))
    except SagaNotFound as missing:
        raise SagaNotFound(
            f"The thread belongs to saga {saga_id!r}, which this log does not hold ({missing}). "
            "Pass the log that the saga was begun with. If its process died before it had done anything, begin anew "
            "with new input.",
            saga_id=saga_id,
        ) from None
    return status


# --- the thread


def _thread_of(graph: Any, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the thread's head; None if nothing of the run is kept.

    Raises:
        DeclarationError: The graph would run as a part of the graph around it.
    """
    conf = {**_conf(getattr(graph, "config", None) or {}), **_conf(config)}
    if conf.get("thread_id") is None:  # LangGraph takes over what surrounds the run, all of it
        conf = _conf(merge_configs(cast(Any, getattr(graph, "config", None)), cast(Any, config)))
        if current_task() is not None:
            if getattr(graph, "checkpointer", None) is not False and conf.get(LENT) is not None:
                raise DeclarationError(
                    "This graph would be a part of the graph around it, resumed with that one, in no saga. Run that "
                    'one with saga_run; or give this one its own thread: config={"configurable": {"thread_id": ...}}.'
                )
            return None
    if conf.get("thread_id") is None or _saver(graph, conf) is None:
        return None
    # Nothing else of the config: reading the thread calls no callbacks, and changes nothing of the caller's.
    return {"configurable": {**_without_address(config), "thread_id": conf["thread_id"]}}


def _saver_of(graph: Any, thread: Mapping[str, Any] | None) -> Any:
    return _saver(graph, _conf(thread or {}))


def _saver(graph: Any, conf: Mapping[str, Any]) -> Any:
    """The checkpointer of the graph, or the one that a server hands over in the config."""
    saver = getattr(graph, "checkpointer", None)
    return saver if saver not in (None, False, True) else conf.get(LENT)


def _conf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("configurable") or {}


def _is_same_run(graph: Any, config: dict[str, Any], head: Any) -> bool:
    """Whether LangGraph takes the input for that of the run which wrote the head, and goes on with that instead."""
    merged = merge_configs(cast(Any, getattr(graph, "config", None)), cast(Any, config))
    known: Mapping[str, Any] = head.metadata or {}
    given = {**_conf(merged), **(merged.get("metadata") or {})}
    return known.get("run_id") is not None and given.get("run_id") == known["run_id"]


def _without_address(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _conf(config).items() if name not in ADDRESS}


def _id_of(state: Any) -> str | None:
    found: str | None = _conf(state.config).get("checkpoint_id")
    return found


def _seen(graph: Any, thread: Mapping[str, Any] | None, state: Any) -> Look[Head]:
    saver = _saver_of(graph, thread)
    # Older versions of LangGraph give all questions of one task the same id.
    shown = tuple(sorted(f"{interrupt.id} {interrupt.value!r}" for interrupt in state.interrupts))
    said = yield from talk(saver, state.config)
    claimed = yield from latest_claim(saver, state.config)
    return Head(_id_of(state), shown + said, claimed)


def _named(state: Any, claimed: Claim) -> str | None:
    """The saga that goes on at a checkpoint, by its claim; else the one that wrote it."""
    metadata: Mapping[str, Any] = state.metadata or {}
    found = claimed.saga_id or metadata.get("saga_id")
    return found if isinstance(found, str) else None


def _is_update(state: Any) -> bool:
    metadata: Mapping[str, Any] = state.metadata or {}
    source = metadata.get("source")
    return source == UPDATE or (source == FORK and "saga_id" not in metadata)


def _warn_of_open(graph: Any, thread: Mapping[str, Any], head: Any) -> Look[None]:
    """New input, and a fork, leave an interrupted run behind, which nobody can resume any more."""
    if head.metadata is None:
        return
    claimed = yield from latest_claim(_saver_of(graph, thread), head.config)
    left = _named(head, claimed)
    if head.next and left and current_saga() is None:
        log.warning(
            "saga %r was left unfinished by another run of its thread; if it still waits, recovery will roll it back",
            left,
        )


def _origin(
    graph: Any, thread: Mapping[str, Any], conf: Mapping[str, Any], addressed: str | None
) -> Look[dict[str, Any]]:
    """What a fork says of where it comes from."""
    state = yield _state(graph, {"configurable": dict(conf)})
    _, found = (yield from _owner(graph, thread, state)) if state.metadata else (None, None)
    return {"forked_from": found, "forked_at": addressed}


def _owner(graph: Any, thread: Mapping[str, Any] | None, state: Any) -> Look[tuple[Any, str | None]]:
    """The checkpoint that people's edits began from, `state` itself if it is none, and the saga that goes on there."""
    while True:
        claimed = yield from latest_claim(_saver_of(graph, thread), state.config)
        if claimed.saga_id is not None or not _is_update(state):
            return state, _named(state, claimed)
        if state.parent_config is None:
            return None, None
        state = yield _state(graph, state.parent_config)


def _is_last(graph: Any, standing: Standing, owner: Any, saga_id: str) -> Look[bool]:
    """Whether the saga's run wrote no checkpoint after this one, which it wrote or has claimed."""
    last = yield _history(graph, standing.thread, saga_id)
    return last is None or str(_id_of(last)) <= str(_id_of(owner))  # LangGraph's ids rise


def _renamed(graph: Any, standing: Standing, head: Any) -> Look[dict[str, str]]:
    """Which task each task of an edited checkpoint was, in the graph and in its subgraphs."""
    renamed: dict[str, str] = {}
    whole = yield _state(graph, standing.thread, subgraphs=True)
    waiting = [whole]
    while waiting:
        state = waiting.pop()
        waiting += [task.state for task in state.tasks if getattr(task.state, "tasks", None) is not None]
        if not _is_update(state):
            continue
        before, _ = yield from _owner(graph, standing.thread, state)
        if before is None or before is state:
            continue
        yield from _refuse_inner_work(graph, standing, before)
        was = {(task.name, task.path): task.id for task in before.tasks}
        renamed |= {task.id: was[task.name, task.path] for task in state.tasks if (task.name, task.path) in was}
    return renamed


def _refuse_inner_work(graph: Any, standing: Standing, before: Any) -> Look[None]:
    """Refuse to go on after an edit of a checkpoint whose tasks had work of their own inside of them.

    LangGraph runs such tasks again from their first line, with nothing that would tell what in them was done.
    """
    saver = _saver_of(graph, standing.thread)
    kept = yield saved(saver, before.config)
    known = {task.id for task in before.tasks}
    writes: list[tuple[str, str, Any]] = list(kept.pending_writes or ()) if kept is not None else []
    inner = any(writer not in known and channel in BY_TASKS for writer, channel, _ in writes)
    base = _conf(before.config).get("checkpoint_ns") or ""
    for task in before.tasks:
        name = f"{base}|{task.name}:{task.id}" if base else f"{task.name}:{task.id}"
        conf = {"thread_id": _conf(before.config)["thread_id"], "checkpoint_ns": name}
        inner = inner or (yield saved(saver, {"configurable": conf})) is not None
    if inner:
        raise DeclarationError(
            "The thread was edited while a subgraph or a @task inside of one of its nodes had run, and LangGraph would "
            "run that again from its start, its effects included. Edit the subgraph's own state instead "
            "(graph.get_state(config, subgraphs=True)), or begin anew with new input."
        )


BY_TASKS = ("__return__", "__interrupt__", "__error__", "__no_writes__")
"""Where LangGraph stores what a task has come to; an edit's own writes go elsewhere."""
