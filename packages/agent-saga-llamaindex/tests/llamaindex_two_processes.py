"""A run in two processes: the first charges and waits for a person, the second answers and charges again."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import (
    Context,
    HumanResponseEvent,
    InputRequiredEvent,
    StartEvent,
    StopEvent,
    Workflow,
    step,
)

sys.path.insert(0, str(Path(__file__).parent))
from llamaindex_fakes import agent, saying

from agent_saga_core import FileLog, compensator, read_saga, recover, saga_tool, undo
from agent_saga_llamaindex import SuspendedRun, dump_state, saga_run, wrap_tool

verb, kind, where = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def write(amount: int) -> None:
    with open(where / "charges", "a", encoding="utf-8") as file:
        file.write(f"{amount}\n")


@compensator("till.refund")
def refund(amount: int) -> None:
    write(-amount)


def charge(amount: int) -> dict[str, int]:
    """Charge an amount."""
    write(amount)
    return {"amount": amount}


async def confirm(ctx: Context, question: str) -> str:
    """Ask a person."""
    answer = await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix=question))
    return str(answer.response)


DECLARATION: dict[str, Any] = {"semantics": "COMPENSABLE", "compensate": undo("till.refund", amount="result.amount")}
charging = wrap_tool(FunctionTool.from_defaults(charge), **DECLARATION)
confirming = wrap_tool(FunctionTool.from_defaults(confirm), semantics="READ_ONLY")
declared = saga_tool(**DECLARATION)(charge)


class OneStep(Workflow):
    """Charges, waits and charges in one step, which is run again from its top."""

    @step
    async def only(self, ctx: Context, ev: StartEvent) -> StopEvent:
        declared(1)
        answer = await confirming.acall(ctx=ctx, question="more?")
        declared(2)
        return StopEvent(result=f"{answer.content}, done")


def made(*turns: Any) -> Any:
    return agent([charging, confirming], saying(*turns)) if kind == "agent" else OneStep(timeout=None)


def call(tool: str, **args: Any) -> Any:
    return [("call_0", tool, args)]


log = FileLog(where / "log")
if verb == "resume":
    state = json.loads((where / "state").read_text(encoding="utf-8"))
    running = made(call("charge", amount=2), "yes, done")
    print(saga_run(running, state, HumanResponseEvent(response="yes"), log=log))
    saga = read_saga(log, "s")
    print(saga.status)
    for taken in saga.steps:
        print(taken.tool, taken.status)
elif verb == "recover":
    report = recover(log)
    print(read_saga(log, "s").status if report.recovered == ("s",) else report)
else:
    running = made(call("charge", amount=1), call("confirm", question="more?"))
    given: dict[str, Any] = {"user_msg": "go"} if kind == "agent" else {}
    waiting = saga_run(running, saga_id="s", log=log, deadline=0.0 if verb == "begin-briefly" else None, **given)
    assert isinstance(waiting, SuspendedRun)
    (where / "state").write_text(json.dumps(dump_state(waiting)), encoding="utf-8")
    if verb == "begin-and-be-killed":
        os.kill(os.getpid(), signal.SIGKILL)
