"""Turns the messages and tools of a chat request into those of a conversation, and checks that they belong together."""

from collections.abc import Sequence

from lockstep_common.errors import invalid

from lockstep_router.faces.openai.plain import PlainChat, PlainMessage
from lockstep_router.faces.openai.schemas import ChatCompletionRequest, Message
from lockstep_router.faces.openai.tool_schemas import NamedToolChoice
from lockstep_router.generation.request import Turn
from lockstep_router.generation.tools import Tool, ToolCall, ToolUse


def turns_of(messages: Sequence[Message | PlainMessage]) -> tuple[Turn, ...]:
    """The messages as turns.

    Raises:
        LockstepError: INVALID_REQUEST, naming the field of a message that does not fit its role or those before it.
    """
    names: dict[str, str] = {}
    """The functions of the calls so far, by the calls' ids."""
    return tuple(_turn(message, f"messages[{index}]", names) for index, message in enumerate(messages))


def _turn(message: Message | PlainMessage, field: str, names: dict[str, str]) -> Turn:
    calls = tuple(ToolCall(each.id, each.function.name, each.function.arguments) for each in message.tool_calls or ())
    if message.role != "assistant":
        for key, value in (("tool_calls", calls), ("reasoning_content", message.reasoning_content)):
            if value:
                raise invalid(f"{field}.{key}", "is only allowed in messages of the assistant")
    if message.content is None and not calls:
        raise invalid(f"{field}.content", "is required")
    name = message.name
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid(f"{field}.tool_call_id", "is required")
        if message.tool_call_id not in names:
            raise invalid(f"{field}.tool_call_id", "is not the id of a tool call in the messages before")
        name = name or names[message.tool_call_id]
    names.update({call.id: call.name for call in calls})
    return Turn(message.role, message.text, name, message.tool_call_id, calls, message.reasoning_content or "")


def tool_use(body: ChatCompletionRequest | PlainChat) -> ToolUse | None:
    """The tools of a request and how the model may use them; None if it may not.

    Raises:
        LockstepError: INVALID_REQUEST, fields contradict each other.
    """
    functions = [tool.function for tool in body.tools or ()]
    tools = tuple(Tool(each.name, each.description, each.parameters, bool(each.strict)) for each in functions)
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    return use_of(tools, choice if isinstance(choice, str) else None, named, is_parallel=body.parallel_tool_calls)


def use_of(tools: tuple[Tool, ...], mode: str | None, named: str | None, *, is_parallel: bool | None) -> ToolUse | None:
    """How tools are used, whichever endpoint they come from.

    Raises:
        LockstepError: INVALID_REQUEST, fields contradict each other.
    """
    names = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise invalid(f"tools[{index}]", f"has the name {tool.name!r} of another tool")
        names.add(tool.name)
    if named is not None and named not in names:
        raise invalid("tool_choice", f"is {named!r}, which is none of the tools")
    if mode == "required" and not tools:
        raise invalid("tool_choice", "needs tools")
    if not tools or mode == "none":
        return None
    # A named function is called once, as OpenAI documents it: clients expect one call.
    return ToolUse(tools, mode == "required" or named is not None, named, is_parallel is not False and named is None)
