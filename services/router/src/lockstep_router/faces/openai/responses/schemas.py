"""The body of POST /v1/responses. Strictly typed, every field bounded."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from lockstep_router.faces.openai.schema_base import (
    GenerationFields,
    JsonObject,
    Strict,
    choice_of,
    object_form,
    text_form,
)
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
_CHANGES_NOTHING = "Changes nothing."

ItemId = Annotated[str, Field(max_length=256)]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_CHARS)]
Status = Literal["in_progress", "completed", "incomplete"]


class TextItemPart(Strict):
    """A part of a message with text; answers that are sent back have the other fields."""

    type: Literal["input_text", "output_text"] = Field(description="`output_text` of answers that are sent back.")
    text: str = Field(description="The text.")
    annotations: list[Any] | None = Field(None, description="Changes nothing.")
    logprobs: list[Any] | None = Field(None, description="Changes nothing.")
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description="Changes nothing.")


_Parts = Annotated[list[TextItemPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")]
Text = Annotated[Annotated[str, Tag("<string>")] | _Parts, choice_of("a string or a list of text parts", text_form)]


class MessageItem(Strict):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="Who says it. `developer` reaches the chat template as `system`."
    )
    content: Text = Field(
        description="The text; parts are lines of one text, those of the type `refusal` of an assistant too."
    )
    phase: Literal["commentary", "final_answer"] | None = Field(None, description=_CHANGES_NOTHING)
    id: ItemId | None = Field(None, description=_CHANGES_NOTHING)
    status: Status | None = Field(None, description=_CHANGES_NOTHING)


class FunctionCallItem(Strict):
    """A call that an earlier answer had."""

    type: Literal["function_call"]
    call_id: CallId = Field(description="The call's id, as the answer had it.")
    name: FunctionName = Field(description="The function's name.")
    arguments: str = Field(description="Its arguments, as JSON text.")
    id: ItemId | None = Field(None, description=_CHANGES_NOTHING)
    status: Status | None = Field(None, description=_CHANGES_NOTHING)


class FunctionCallOutputItem(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId = Field(description="The call that this is the result of; its item comes before.")
    output: Text = Field(description="The result; parts are lines of one text.")
    id: ItemId | None = Field(None, description=_CHANGES_NOTHING)
    status: Status | None = Field(None, description=_CHANGES_NOTHING)


class ReasoningText(Strict):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: str = Field(description="The text.")


class SummaryText(Strict):
    """A part of a summary."""

    type: Literal["summary_text"]
    text: str = Field(description="The text.")


class ReasoningItem(Strict):
    """Reasoning that an earlier answer had."""

    type: Literal["reasoning"]
    id: ItemId | None = Field(None, description=_CHANGES_NOTHING)
    summary: list[SummaryText] = Field(
        default_factory=list,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="Changes nothing: what the model gets is the reasoning itself. Answers have none.",
    )
    content: list[ReasoningText] | None = Field(
        None, max_length=MAX_MESSAGES, fail_fast=True, description="The reasoning's text."
    )
    status: Status | None = Field(None, description=_CHANGES_NOTHING)


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
    name: FunctionName = Field(description="Its name.")
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS, description="What it does, for the model.")
    parameters: JsonObject | None = Field(None, description="A JSON schema of its arguments.")
    strict: bool | None = Field(
        None, description="Arguments conform to the schema with `auto` too; those of a required call do in any case."
    )


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: FunctionName = Field(description="One of those in `tools`.")


class TextFormat(Strict):
    """The form of the answer's text: any, a JSON object, or JSON that conforms to a schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON that conforms to a schema."
    )
    name: str | None = Field(
        None, pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="A name of the client's own; changes nothing."
    )
    schema_: JsonObject | None = Field(None, alias="schema", description="The JSON schema, of the type `json_schema`.")
    description: str | None = Field(None, max_length=4096, description=_CHANGES_NOTHING)
    strict: bool | None = Field(None, description="Answers conform to the schema in any case.")


class TextOptions(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = Field(None, description="The form of the text.")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=_CHANGES_NOTHING)


class ReasoningOptions(Strict):
    """Options of reasoning models."""

    effort: ReasoningEffort | None = Field(
        None, description="For templates that use it; in others `none` turns reasoning off where the template can."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Changes nothing: no summary is made, and the answer has the reasoning itself."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="An older name of `summary`."
    )


class ResponseStreamOptions(Strict):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = Field(None, description=_CHANGES_NOTHING)


class ResponsesRequest(GenerationFields):
    """POST /v1/responses."""

    input: Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
        choice_of("a string or a list of items", text_form),
    ] = Field(description="What the user says, or the items of the conversation so far.")
    instructions: str | None = Field(
        None, description="Become the system message, before the text of one that begins the input."
    )
    tools: list[ResponseTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="Functions that the model may call."
    )
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedTool, Tag("<object>")],
            choice_of("none, auto, required or a function", object_form),
        ]
        | None
    ) = Field(
        None,
        description="`none`: no call, and the template gets no tools; `auto`: the model chooses; `required`, or a "
        "function: the answer is a call. Default: `auto`.",
    )
    parallel_tool_calls: bool | None = Field(None, description="`false`: the answer ends after its first call.")
    text: TextOptions | None = Field(None, description="Options of the answer's text.")
    reasoning: ReasoningOptions | None = Field(None, description="Options of reasoning models.")
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        lt=1 << 31,
        description="Most tokens of the answer, reasoning included. Default: what the context has room for.",
    )
    seed: int | None = Field(
        None,
        ge=-(1 << 63),
        lt=1 << 64,
        description="Equal requests with one seed have equal answers, on equal workers. An extension.",
    )
    chat_template_kwargs: dict[TemplateFieldName, TemplateFieldValue] | None = Field(
        None, max_length=MAX_TEMPLATE_FIELDS, description="Further values for the chat template. An extension."
    )
    stream: bool | None = Field(None, description="The answer comes as events, while it is generated.")
    stream_options: ResponseStreamOptions | None = Field(None, description="Needs `stream`.")
    store: bool | None = Field(None, description="May not be true: nothing is kept between requests.")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=MAX_METADATA, description="The answer repeats it."
    )
    user: str | None = Field(
        None, max_length=1024, description="Requests with one value prefer one worker, as with `X-Session-ID`."
    )
    resumable: bool | None = Field(
        None, description="The generation goes on when the client leaves, so that it can come back. An extension."
    )
