"""One saga over three frameworks: a CrewAI researcher, a LangGraph writer, an AutoGen reviewer.

`python examples/cross_framework.py`. The researcher reserves a budget, the writer publishes an event, the reviewer
notifies the guests, and fails: the service takes no mails today. What the other two did is undone, last first. The
service is a process of its own that knows nothing of sagas (that of `agent-saga demo`); the models play scripts instead
of thinking. What is printed of effects is read from the service. Set `$AGENT_SAGA_DEMO_URL` to use one that runs
already. Exits with 1 if anything is left, or if the log holds anything but one saga.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from contextlib import ExitStack
from typing import Any

# CrewAI and LangSmith report to their makers unless they are told not to, before they are imported.
os.environ.update(
    CREWAI_DISABLE_TELEMETRY="true",
    CREWAI_DISABLE_TRACKING="true",
    CREWAI_DISABLE_VERSION_CHECK="true",
    CREWAI_TESTING="true",  # no question whether to look at traces
    CREWAI_TRACING_ENABLED="false",
    LANGSMITH_TRACING="false",
    OTEL_SDK_DISABLED="true",
)
warnings.simplefilter("ignore")  # CrewAI's, about CrewAI
# AutoGen's replaying client logs that it cannot count the tokens of calls.
logging.getLogger("autogen_core").setLevel(logging.ERROR)
logging.getLogger("crewai").setLevel(logging.ERROR)

from autogen_agentchat.agents import AssistantAgent  # noqa: E402
from autogen_core import FunctionCall  # noqa: E402
from autogen_core.models import CreateResult, ModelFamily, RequestUsage  # noqa: E402
from autogen_core.tools import FunctionTool  # noqa: E402
from autogen_ext.models.replay import ReplayChatCompletionClient  # noqa: E402
from crewai import Agent, BaseLLM, Crew, Task  # noqa: E402
from crewai.tools import tool as crewai_tool  # noqa: E402
from langchain_core.language_models.chat_models import BaseChatModel  # noqa: E402
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage  # noqa: E402
from langchain_core.outputs import ChatGeneration, ChatResult  # noqa: E402
from langchain_core.tools import tool as langchain_tool  # noqa: E402
from langgraph.graph import START, MessagesState, StateGraph  # noqa: E402
from langgraph.prebuilt import ToolNode, tools_condition  # noqa: E402
from pydantic import PrivateAttr  # noqa: E402

import agent_saga_autogen  # noqa: E402
import agent_saga_crewai  # noqa: E402
import agent_saga_langgraph  # noqa: E402
from agent_saga_core import SagaAborted, SagaFleet, compensator, list_sagas, open_log, read_saga, undo  # noqa: E402
from agent_saga_core.demo.client import Client, Service, nothing_happened  # noqa: E402

URL = "AGENT_SAGA_DEMO_URL"


def service() -> Client:
    return Client(os.environ[URL])


# -- how each effect is undone; found by name, in whichever process finishes the saga


@compensator("launch.void")
def void(key: str, *, idempotency_key: str) -> None:
    """Undo what was done under a key, or see to it that nothing ever is."""
    service().cancel_key(key, key=idempotency_key)


@compensator("launch.withdraw")
def withdraw(booking_id: str, *, idempotency_key: str) -> None:
    service().cancel(booking_id, key=idempotency_key)


# -- the tools, each of its framework. No model is shown an idempotency key.


@crewai_tool("reserve_budget")
def reserve_budget(cents: int, idempotency_key: str) -> dict[str, Any]:
    """Set money aside for the launch."""
    return service().transfer("marketing", "launch", cents, key=idempotency_key)


@langchain_tool
def publish(title: str, idempotency_key: str) -> dict[str, Any]:
    """Publish the event: from now on its evening is booked."""
    return service().book("hotel", title=title, key=idempotency_key)


def notify(subject: str, *, idempotency_key: str) -> dict[str, Any]:
    """Tell the guests. Nobody can take a mail back."""
    return service().mail("guests", subject, key=idempotency_key)


# -- one fleet over all three: each tool is recognised, and stays its framework's own

fleet = SagaFleet("launch")
RESERVE = fleet.register(
    reserve_budget,
    semantics="COMPENSABLE",
    compensate=undo(void, key="step.forward_key", if_absent="forbids"),
    not_applied=nothing_happened,
)
PUBLISH = fleet.register(
    publish,
    semantics="COMPENSABLE",
    compensate=undo(withdraw, booking_id="result.id"),
    not_applied=nothing_happened,
)
NOTIFY = fleet.register(
    FunctionTool(notify, description="Tell the guests."), semantics="IRREVERSIBLE", not_applied=nothing_happened
)


# -- the agents, with models that play scripts. All of them begin at call_0.


class ResearcherModel(BaseLLM):
    _asked: int = PrivateAttr(default=0)

    def supports_function_calling(self) -> bool:
        return True

    def get_context_window_size(self) -> int:
        return 1_000_000

    def call(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        self._asked += 1
        if self._asked > 1:
            return "The budget is reserved."
        given = json.dumps({"cents": 90000})
        return [{"id": "call_0", "type": "function", "function": {"name": "reserve_budget", "arguments": given}}]


def researchers() -> Crew:
    agent = Agent(
        role="researcher", goal="find the money", backstory="", tools=[RESERVE], llm=ResearcherModel(model="script")
    )
    return Crew(agents=[agent], tasks=[Task(description="Reserve a budget.", expected_output="a word", agent=agent)])


class WriterModel(BaseChatModel):
    @property
    def _llm_type(self) -> str:
        return "script"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        if isinstance(messages[-1], HumanMessage):
            call: Any = {"name": "publish", "args": {"title": "An evening in Porto"}, "id": "call_0"}
            message = AIMessage("", tool_calls=[call])
        else:
            message = AIMessage("It is public.")
        return ChatResult(generations=[ChatGeneration(message=message)])


def writer() -> Any:
    model = WriterModel()

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([PUBLISH]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


def reviewer() -> AssistantAgent:
    call = FunctionCall("call_0", json.dumps({"subject": "Come to Porto"}), "notify")
    usage = RequestUsage(prompt_tokens=1, completion_tokens=1)
    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": ModelFamily.UNKNOWN,
        "structured_output": False,
    }
    model = ReplayChatCompletionClient(
        [CreateResult(finish_reason="function_calls", content=[call], usage=usage, cached=False), "It was not sent."],
        model_info=info,
    )
    return AssistantAgent("reviewer", model, tools=[NOTIFY], reflect_on_tool_use=True)


# -- the saga


def launch(log: Any) -> None:
    crew, graph, agent = researchers(), writer(), reviewer()
    for name, team in (("crew", crew), ("graph", graph), ("agent", agent)):
        fleet.observe(team, name=name)
    fleet.assert_fully_covered(acknowledge=["graph/node:think"])  # it calls the model and nothing else

    def approve(request: Any) -> bool:
        print(f"a person is asked whether to {request.tool}, and says yes")
        return True

    with fleet.transaction("launch-porto", log=log, approve=approve) as saga:
        print("CrewAI researcher:", agent_saga_crewai.saga_run(crew).raw)
        said = agent_saga_langgraph.saga_run(graph, {"messages": [HumanMessage("Publish it.")]})
        print("LangGraph writer:", said["messages"][-1].content)
        print("AutoGen reviewer:", agent_saga_autogen.saga_run(agent, task="Notify them.").messages[-1].content)
        if any(step.tool == "notify" and step.status != "DONE" for step in saga.steps):
            # The model was told of the error and ended its turn like any other. What a launch is, is for us to say.
            saga.abort("nobody was notified")


def told(ledger: dict[str, Any]) -> list[tuple[str, str]]:
    """What the service did and refused, in its own order: (what, id)."""
    made = {one["id"]: one for kind in ("transfers", "bookings", "cancellations", "mails") for one in ledger[kind]}
    rows: list[tuple[str, str]] = []
    for entry in ledger["journal"]:
        if entry["entry"] == "effect":
            one = made[entry["id"]]
            rows.append((f"{entry['kind']} {_what(one, made)}", one["id"]))
        elif entry["entry"] == "request" and entry["status"] >= 400:
            rows.append((f"{entry['path'][1:-1]} {entry['body'].get('subject', '')}", f"refused ({entry['status']})"))
    return rows


def _what(one: dict[str, Any], made: dict[str, Any]) -> str:
    if "booking_id" in one:
        return f"of {made[one['booking_id']]['title']}"
    if "source" in one:
        back = f", which takes {one['reverses']} back" if one["reverses"] else ""
        return f"{one['source']} -> {one['target']} {one['amount'] / 100:.2f}{back}"
    return str(one.get("title") or one.get("subject"))


def main() -> int:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["CREWAI_STORAGE_DIR"] = directory
        if URL not in os.environ:
            os.environ[URL] = stack.enter_context(Service.start()).url
        client = service()
        client.fail("/mails", answer=422, error="no_mails_today", times=None)
        log = open_log(f"file:{directory}/log")
        stack.callback(log.close)
        try:
            launch(log)
        except SagaAborted as aborted:
            print(f"\n{aborted}\n")
        print(f"what the service (process {client.request('GET', '/health').body['pid']}) did:")
        for what, id_ in told(client.ledger()):
            print(f"  {what:<62} {id_}")
        left = client.summary()["left"]
        print("left of it:", ", ".join(left) or "nothing")
        sagas = list_sagas(log)
        print(f"\nsagas in the log: {', '.join(head.saga_id for head in sagas)}")
        for step in read_saga(log, sagas[0].saga_id).steps:
            print(f"  {step.number} {step.tool:<15} {step.semantics:<13} {step.status}")
        return 1 if left or len(sagas) != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
