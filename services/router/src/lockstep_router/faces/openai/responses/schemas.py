"""The body of POST /v1/responses. Strictly typed, every field bounded."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from lockstep_router.faces.openai.schema_base import Strict, choice_of, object_form, text_form
from lockstep_router.faces.openai.schemas import MAX_MESSAGES, ReasoningEffort
from lockstep_router.faces.openai.tool_schemas import (
    MAX_CALL_ID_CHARS,
    MAX_DESCRIPTION_CHARS,
    MAX_TEMPLATE_FIELDS,
    MAX_TOOLS,
    FunctionName,
    TemplateFieldName,
    TemplateFieldValue,
)

MAX_METADATA = 16

ItemId = Annotated[str, Field(max_length=256)]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_CHARS)]
Status = Literal["in_progress", "completed", "incomplete"]


class TextItemPart(Strict):
    """A part of a message with text; answers that are sent back have the other fields."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_Parts = Annotated[list[TextItemPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")]
Text = Annotated[Annotated[str, Tag("<string>")] | _Parts, choice_of("a string or a list of text parts", text_form)]


class MessageItem(Strict):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    id: ItemId | None = None
    status: Status | None = None


class FunctionCallItem(Strict):
    """A call that an earlier answer had."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str
    id: ItemId | None = None
    status: Status | None = None


class FunctionCallOutputItem(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Text
    id: ItemId | None = None
    status: Status | None = None


class ReasoningText(Strict):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    """Reasoning that an earlier answer had."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: list[Any] = Field(default_factory=list, max_length=0)
    content: list[ReasoningText] | None = Field(None, max_length=MAX_MESSAGES, fail_fast=True)
    status: Status | None = None


_ITEM_FORMS = ("message", "function_call", "function_call_output", "reasoning")


def _item_form(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) and kind in _ITEM_FORMS else None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    choice_of("an item of the type message, function_call, function_call_output or reasoning", _item_form),
]


class ResponseTool(Strict):
    """A function that the model may call; there are no other tools."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Strict):
    """The form of the answer's text: any, a JSON object, or JSON that conforms to a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = Field(None, max_length=4096)
    strict: bool | None = Field(None, description="Answers conform to the schema in any case.")


class TextOptions(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Changes nothing."""


class ReasoningOptions(Strict):
    """Options of reasoning models."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    """No summary is made; the answer has the reasoning itself."""


class ResponseStreamOptions(Strict):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = None
    """Changes nothing."""


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    model: str = Field(min_length=1, max_length=256)
    input: Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
        choice_of("a string or a list of items", text_form),
    ]
    instructions: str | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedTool, Tag("<object>")],
            choice_of("none, auto, required or a function", object_form),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    chat_template_kwargs: dict[TemplateFieldName, TemplateFieldValue] | None = Field(
        None, max_length=MAX_TEMPLATE_FIELDS
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=MAX_METADATA
    )
    user: str | None = Field(None, max_length=1024)
    resumable: bool | None = None
    """Whether the generation goes on when the client leaves; an extension."""
