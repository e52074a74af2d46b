"""A process with all the frameworks in it. One job a line on stdin, as JSON; what came of it on stdout, as JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.update(OPENAI_API_KEY="none", OPENAI_AGENTS_DISABLE_TRACING="1")

from cross_acts import BOUND, BY_RESULT, DECLARATION, act
from cross_teams import FRAMEWORKS, Team, harness_of, on_a_loop
from pydantic import BaseModel

from agent_saga_core import SagaBusy, SagaFleet, carry, saga_scope
from agent_saga_core.saga import Saga
from agent_saga_core.testing import Script
from agent_saga_core.wrapping import covered, runner_of

Json = dict[str, Any]


class TripFailed(Exception):
    """The work as a whole is given up."""


def _attempt(team: Team) -> str:
    """Run a team whose tool fails; what its caller hears of that."""
    try:
        return f"said: {team.run().text}"
    except Exception as error:
        return f"raised: {type(error).__name__}"


def _told(saga: Saga) -> Json:
    report = saga.report
    assert report is not None
    return {
        "status": str(report.status),
        "clean": report.clean,
        "steps": [[step.tool, str(step.status)] for step in saga.steps],
    }


def _same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two faces of a tool are equal."""
    return one.keys() == other.keys() and all(one[name] is other[name] or one[name] == other[name] for name in one)


def _changeable(found: Any) -> set[int]:
    """Everything in a tool's face that somebody could change in place."""
    left, seen = [found], set[int]()
    while left:
        one = left.pop()
        if isinstance(one, type) or id(one) in seen:
            continue
        if isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, list | tuple | set):
            left += one
        elif isinstance(one, BaseModel) or dataclasses.is_dataclass(one):
            left += vars(one).values()
        if isinstance(one, dict | list | set | BaseModel) or dataclasses.is_dataclass(one):
            seen.add(id(one))
    return seen


def imports() -> Json:
    """Import every framework."""
    return {"frameworks": [type(harness_of(name)).__name__ for name in FRAMEWORKS]}


def everybody(saga_id: str, log: str, fails: str) -> Json:
    """One after the other acts in one saga; `fails` is the last, and the trip with it."""
    order = [*[name for name in FRAMEWORKS if name != fails], fails]
    saga = saga_scope(saga_id, log=log)
    heard = ""
    try:
        with saga:
            for number, name in enumerate(order[:-1]):
                Team(name, act(name), BY_RESULT if number % 2 else DECLARATION).run()
            heard = _attempt(Team(fails, act(fails), DECLARATION))
            raise TripFailed
    except TripFailed:
        pass
    return {**_told(saga), "heard": heard}


def pair(saga_id: str, log: str, first: str, second: str) -> Json:
    """Each on a thread of its own, through its sync entry: the first succeeds, the second fails."""
    saga = saga_scope(saga_id, log=log)
    outcomes: list[Any] = []

    def on_a_thread(work: Any) -> None:
        def run() -> None:
            try:
                outcomes.append(work())
            except BaseException as error:
                outcomes.append(error)

        thread = threading.Thread(target=carry(run))
        thread.start()
        thread.join()

    try:
        with saga:
            on_a_thread(lambda: Team(first, act(first), BY_RESULT).run().text)
            if isinstance(outcomes[0], BaseException):
                raise outcomes[0]
            on_a_thread(lambda: _attempt(Team(second, act(second), DECLARATION)))
            raise TripFailed
    except TripFailed:
        pass
    return {**_told(saga), "heard": str(outcomes[1])}


def together(saga_id: str, log: str, first: str, second: str, fails: bool) -> Json:
    """Two frameworks at once on one loop in one saga: neither acts before the other is about to."""
    saga = saga_scope(saga_id, log=log)
    meeting = threading.Barrier(2)
    teams = [Team(name, act(name, is_async=True, meeting=meeting), BY_RESULT) for name in (first, second)]

    async def main() -> None:
        async with saga:
            with ExitStack() as stack:
                stack.enter_context(covered(saga, [team.tool for team in teams]))
                await asyncio.gather(*(team.native() for team in teams))
            if fails:
                raise TripFailed

    try:
        on_a_loop(main)
    except TripFailed:
        pass
    return _told(saga)


def second_run(saga_id: str, log: str, first: str, second: str) -> Json:
    """While an adapter's run is a part of the saga, another adapter begins one as well, and then once more."""
    saga = saga_scope(saga_id, log=log)
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        go_on.wait(BOUND)

    def team(name: str, **more: Any) -> Team:
        return Team(name, act(name, is_async=True, **more), BY_RESULT)

    async def main() -> str:
        async with saga:
            running = asyncio.create_task(team(first, first=hold).native(adapted=True))
            try:
                await asyncio.to_thread(inside.wait, BOUND)
                await team(second).native(adapted=True)
                heard = "nothing"
            except SagaBusy as busy:
                heard = str(busy)
            finally:
                go_on.set()
            await running
            await team(second).native(adapted=True)
        return heard

    heard = on_a_loop(main)
    return {**_told(saga), "heard": heard}


def nested(saga_id: str, log: str, outer: str, inner: str) -> Json:
    """An agent of one framework is a tool of another one's agent; then the work as a whole fails."""
    saga = saga_scope(saga_id, log=log)
    try:
        with saga:
            team = Team(inner, act(inner), BY_RESULT)
            # Where a sync tool would run on a loop, which the inner run could not block, the tool is async.
            is_async = outer not in ("langchain", "langgraph")
            Team(outer, act(outer, is_async=is_async, first=team.run), BY_RESULT).run()
            raise TripFailed
    except TripFailed:
        pass
    return _told(saga)


def shared(saga_id: str, log: str) -> Json:
    """One function is a tool of every framework, registered with one fleet; everybody uses it, and the trip fails."""
    fn = act("shared")
    plain = {name: harness_of(name).tool(fn) for name in FRAMEWORKS}
    marks, faces = dict(vars(fn)), {name: dict(harness_of(name).face(tool)) for name, tool in plain.items()}
    fleet = SagaFleet("trip", log=log)
    tools = {name: fleet.register(tool, **BY_RESULT) for name, tool in plain.items()}
    for name, tool in tools.items():
        fleet.observe(harness_of(name).agent([tool], Script(())), name=name)
    fleet.assert_fully_covered()
    saga: Saga | None = None
    try:
        with fleet.transaction(saga_id) as saga:
            for name, tool in tools.items():
                Team(name, fn, BY_RESULT, tool=tool).run()
            raise TripFailed
    except TripFailed:
        pass
    assert saga is not None
    shown = [harness_of(name).face(tool) for name, tool in tools.items()]  # kept, or ids would be used again
    parts = Counter(part for face in shown for part in _changeable(face))
    return {
        **_told(saga),
        "adapters": {name: runner.adapter for name, tool in tools.items() if (runner := runner_of(tool)) is not None},
        "runners": len({id(runner_of(tool)) for tool in tools.values()}),
        "unwrapped": [name for name, tool in plain.items() if runner_of(tool) is None],
        "covered": sorted({entry.path for entry in fleet.coverage().covered}),
        "changed": [name for name, face in faces.items() if not _same(face, harness_of(name).face(plain[name]))],
        "marked": [name for name in {*marks, *vars(fn)} if marks.get(name) != vars(fn).get(name)],
        "parts in common": sum(times > 1 for times in parts.values()),
    }


def upto(saga_id: str, log: str, last: str) -> Json:
    """Everybody before `last` acts, then `last`, in whose turn the process is killed."""
    names = list(FRAMEWORKS)
    with saga_scope(saga_id, log=log):
        for name in names[: names.index(last) + 1]:
            Team(name, act(name), DECLARATION).run()
    return {}


JOBS = {job.__name__: job for job in (imports, everybody, pair, together, second_run, nested, shared, upto)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # frameworks print what they like
    for line in sys.stdin:
        job, options = json.loads(line)
        try:
            answer = {"ok": JOBS[job](**options)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
