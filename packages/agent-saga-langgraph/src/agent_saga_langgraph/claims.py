"""Whose a checkpoint is that another run has written: the saga which goes on there says so beside it.

A saga's id stands in the metadata of the checkpoints that its own run wrote. One that begins at a checkpoint of another
run (a finished one that is given more to do, an edited one, one without a saga, one that was rolled back) may come to
an interrupt, or be killed, before it has written any. What resumes the thread then has to find it, or it would do its
work once more. So it claims the checkpoint, with a write that is stored next to those of the checkpoint's tasks and
belongs to none of them. LangGraph passes over it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from agent_saga_langgraph.looking import Look, Read

__all__ = ["UNCLAIMED", "Claim", "claim", "latest_claim", "saved", "talk"]

CHANNEL = "__agent_saga__"
TASK = "agent_saga:"
TALK = ("__interrupt__", "__resume__")
"""Where LangGraph stores a task's questions, and the answers that it has got."""


class Claim(NamedTuple):
    """The last claim of a checkpoint: each later one, after the saga before it has ended, has the next number."""

    number: int
    saga_id: str | None


UNCLAIMED = Claim(0, None)


def saved(saver: Any, config: Any) -> Read:
    """What the checkpointer holds of the checkpoint that this config addresses."""
    return Read(lambda: saver.get_tuple(config), lambda: saver.aget_tuple(config))


def latest_claim(saver: Any, config: Any) -> Look[Claim]:
    """The last claim of the checkpoint that this config addresses."""
    writes = yield from _writes(saver, config)
    claims = [Claim(int(task[len(TASK) :]), str(value)) for task, channel, value in writes if channel == CHANNEL]
    return max(claims, default=UNCLAIMED)


def talk(saver: Any, config: Any) -> Look[tuple[str, ...]]:
    """What the tasks of a checkpoint have asked and were answered; also those that no state of the graph shows."""
    writes = yield from _writes(saver, config)
    return tuple(sorted(f"{task} {channel} {value!r}" for task, channel, value in writes if channel in TALK))


def _writes(saver: Any, config: Any) -> Look[list[tuple[str, str, Any]]]:
    found = yield saved(saver, config)
    return list(found.pending_writes or ()) if found is not None else []


def claim(saver: Any, config: Any, number: int, saga_id: str) -> Look[bool]:
    """Claim a checkpoint under this number; whether it was had. A checkpointer keeps the first write of its kind."""
    writes, task = [(CHANNEL, saga_id)], f"{TASK}{number:06d}"
    yield Read(lambda: saver.put_writes(config, writes, task), lambda: saver.aput_writes(config, writes, task))
    now = yield from latest_claim(saver, config)
    return now == Claim(number, saga_id)
