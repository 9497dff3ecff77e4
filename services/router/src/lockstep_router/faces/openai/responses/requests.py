"""Turns the body of POST /v1/responses into a request for `generation`."""

from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import invalid

from lockstep_router.faces import identity
from lockstep_router.faces.identity import Origin
from lockstep_router.faces.openai.json_structure import check_texts
from lockstep_router.faces.openai.responses.format import options_of
from lockstep_router.faces.openai.responses.schemas import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    Text,
)
from lockstep_router.faces.openai.structured import grammar_of_text
from lockstep_router.faces.openai.tool_turns import use_of
from lockstep_router.generation.request import Conversation, GenerationRequest, Turn
from lockstep_router.generation.style import Style
from lockstep_router.generation.tools import Tool, ToolCall
from lockstep_router.settings import RouterSettings


def responses_request(body: ResponsesRequest, origin: Origin, settings: RouterSettings) -> GenerationRequest:
    """The request of /v1/responses.

    Raises:
        LockstepError: INVALID_REQUEST, fields contradict each other or need what this router does not have.
    """
    if body.store:
        raise invalid("store", "is not supported: this router keeps no responses")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    tools = tuple(Tool(each.name, each.description, each.parameters, bool(each.strict)) for each in body.tools or ())
    choice = body.tool_choice
    mode, named = (choice, None) if isinstance(choice, str) else (None, choice.name if choice else None)
    conversation = Conversation(
        _turns(body, settings),
        field="input",
        tools=use_of(tools, mode, named, is_parallel=body.parallel_tool_calls),
        template_fields=body.chat_template_kwargs or {},
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    return GenerationRequest(
        model=body.model,
        caller=identity.caller(origin, body.user),
        prompts=(conversation,),
        sampling=inference_pb2.Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            # None where the client sets none: 0 would take the place of the model's own setting.
            top_k=None if body.top_k is None else max(0, body.top_k),
            min_p=body.min_p,
            grammar=_grammar(body),
        ),
        max_tokens=body.max_output_tokens,
        max_tokens_field="max_output_tokens",
        seed=body.seed,
    )


def responses_style(body: ResponsesRequest) -> Style:
    """How the answer of /v1/responses is written."""
    return Style("responses", stream=bool(body.stream), include_usage=True, logprobs=False, options=options_of(body))


def _grammar(body: ResponsesRequest) -> inference_pb2.Grammar | None:
    form = None if body.text is None else body.text.format
    return None if form is None else grammar_of_text(form.type, form.schema_, "text.format")


def _turns(body: ResponsesRequest, settings: RouterSettings) -> tuple[Turn, ...]:
    if isinstance(body.input, str):
        turns = [Turn("user", body.input)]
    else:
        calls = (item.arguments for item in body.input if isinstance(item, FunctionCallItem))
        check_texts(calls, settings.max_body_values)
        conversation = _Items()
        for index, item in enumerate(body.input):
            conversation.add(item, f"input[{index}]")
        turns = conversation.turns()
    if body.instructions:
        first = turns[0] if turns and turns[0].role in ("system", "developer") else None
        # Many templates take one system message, at the beginning.
        text = body.instructions if first is None else f"{body.instructions}\n\n{first.content}"
        turns = [Turn("system", text), *(turns if first is None else turns[1:])]
    return tuple(turns)


class _Items:
    """Makes messages of items: reasoning, a text and calls that follow each other are one message of the assistant."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._names: dict[str, str] = {}
        """The functions of the calls so far, by the calls' ids."""
        self._reasoning: list[str] = []
        self._text: str | None = None
        self._calls: list[ToolCall] = []

    def add(self, item: Item, field: str) -> None:
        match item:
            case ReasoningItem():
                if self._text is not None or self._calls:
                    self._flush()
                self._reasoning += [part.text for part in item.content or ()]
            case MessageItem(role="assistant"):
                if self._text is not None or self._calls:
                    self._flush()
                self._text = _text(item.content)
            case MessageItem():
                self._flush()
                self._turns.append(Turn(item.role, _text(item.content)))
            case FunctionCallItem():
                self._calls.append(ToolCall(item.call_id, item.name, item.arguments))
                self._names[item.call_id] = item.name
            case FunctionCallOutputItem():
                self._flush()
                if item.call_id not in self._names:
                    raise invalid(f"{field}.call_id", "is not the id of a function_call before")
                self._turns.append(Turn("tool", _text(item.output), self._names[item.call_id], item.call_id))

    def turns(self) -> list[Turn]:
        self._flush()
        return self._turns

    def _flush(self) -> None:
        if self._text is not None or self._calls or self._reasoning:
            reasoning = "\n".join(self._reasoning)
            turn = Turn("assistant", self._text or "", calls=tuple(self._calls), reasoning=reasoning)
            self._turns.append(turn)
        self._text, self._calls, self._reasoning = None, [], []


def _text(content: Text) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
