"""A chat service that plays turns instead of thinking; everything behind it is Semantic Kernel's own.

No `from __future__ import annotations` here: the framework's models read these annotations.
"""

import json
import warnings
from collections.abc import AsyncGenerator, Callable
from typing import Any, ClassVar

from pydantic import PydanticDeprecationWarning
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_calling_utils import kernel_function_metadata_to_function_call_format
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    StreamingChatMessageContent,
    StreamingTextContent,
    TextContent,
)
from semantic_kernel.functions import KernelFunction, KernelPlugin

Said = str | list[tuple[str | None, str, dict[str, Any]]]
"""What a model says: its final text, or calls `(id, function, arguments)`."""

ATTEMPTS = 1000


class ScriptedChat(ChatCompletionClientBase):
    """Asks `answer` for its next turn, with the texts of all function results that it was shown."""

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True
    answer: Callable[[list[str]], Any]

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        return PromptExecutionSettings

    def _update_function_choice_settings_callback(self) -> Callable[..., None]:
        return lambda *_: None

    def _reset_function_choice_settings(self, settings: Any) -> None:
        pass

    def _verify_function_choice_settings(self, settings: Any) -> None:
        pass

    def _turn(self, history: ChatHistory) -> Said:
        heard: list[str] = []
        asked: list[str | None] = []
        results: dict[str | None, str] = {}
        for message in [*history.messages, ChatMessageContent(role=AuthorRole.ASSISTANT, content="")]:
            if message.role is AuthorRole.ASSISTANT:
                # Results stand in the order in which they came; a model reads each beside its call.
                heard += [results[id] for id in asked if id in results]
                asked = [item.id for item in message.items if isinstance(item, FunctionCallContent)]
                results = {}
            results |= {item.id: str(item.result) for item in message.items if isinstance(item, FunctionResultContent)}
        return self.answer(heard)

    async def _inner_get_chat_message_contents(self, chat_history: ChatHistory, settings: Any) -> list[Any]:
        turn = self._turn(chat_history)
        items = [TextContent(text=turn)] if isinstance(turn, str) else [call(*one) for one in turn]
        return [ChatMessageContent(role=AuthorRole.ASSISTANT, items=items)]

    async def _inner_get_streaming_chat_message_contents(
        self, chat_history: ChatHistory, settings: Any, function_invoke_attempt: int = 0
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        turn = self._turn(chat_history)
        parts: list[Any] = [[StreamingTextContent(choice_index=0, text=turn if isinstance(turn, str) else "... ")]]
        if not isinstance(turn, str):
            parts.append([call(*one, index=n) for n, one in enumerate(turn)])
        for items in parts:
            yield [
                StreamingChatMessageContent(
                    role=AuthorRole.ASSISTANT,
                    choice_index=0,
                    items=items,
                    ai_model_id=self.ai_model_id,
                    function_invoke_attempt=function_invoke_attempt,
                )
            ]


def call(id: str | None, name: str, args: dict[str, Any], index: int | None = None) -> FunctionCallContent:
    plugin, _, function = name.rpartition("-")
    plugin = plugin or "desk"
    return FunctionCallContent(
        id=id,
        index=index,
        name=f"{plugin}-{function}",
        plugin_name=plugin,
        function_name=function,
        arguments=json.dumps(args),
    )


def playing(*turns: Said, heard: list[list[str]] | None = None) -> ScriptedChat:
    """A service that says these turns and then "done"; what it was shown each time is put into `heard`."""
    left = list(turns)

    def answer(shown: list[str]) -> Said:
        if heard is not None:
            heard.append(shown)
        return left.pop(0) if left else "done"

    return ScriptedChat(ai_model_id="scripted", answer=answer)


def kernel(*functions: KernelFunction, service: ScriptedChat | None = None, plugin: str = "desk") -> Kernel:
    made = Kernel(plugins=[KernelPlugin(name=plugin, functions=list(functions))] if functions else None)
    if service is not None:
        made.add_service(service)
    return made


def agent(
    *functions: KernelFunction, service: ScriptedChat, name: str = "clerk", attempts: int = ATTEMPTS, **more: Any
) -> ChatCompletionAgent:
    return ChatCompletionAgent(
        kernel=kernel(*functions),
        service=service,
        name=name,
        function_choice_behavior=FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=attempts),
        **more,
    )


def schema(function: KernelFunction) -> dict[str, Any]:
    """What a model is shown of a function."""
    return kernel_function_metadata_to_function_call_format(function.metadata)


def team(*agents: ChatCompletionAgent) -> KernelPlugin:
    """Agents as the functions of a plugin. The framework reads all their attributes, and pydantic warns of some."""
    made = KernelPlugin(name="team")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PydanticDeprecationWarning)
        for one in agents:
            made.update(KernelPlugin.from_object("team", one))
    return made
