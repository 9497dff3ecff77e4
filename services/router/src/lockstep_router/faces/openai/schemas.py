"""The request bodies: OpenAI's fields and a few extensions. Strictly typed, every field bounded."""

from typing import Annotated, Any, Literal

from lockstep_common.protocol import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from pydantic import Field, Tag

from lockstep_router.faces.openai.schema_base import Strict, choice_of, text_form
from lockstep_router.faces.openai.tool_schemas import (
    MAX_CALL_ID_CHARS,
    MAX_CALLS,
    MAX_TEMPLATE_FIELDS,
    MAX_TOOLS,
    Call,
    FunctionTool,
    TemplateFieldName,
    TemplateFieldValue,
    ToolChoice,
)

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096
MAX_IDS = 1 << 20
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
IdList = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]
ChoiceString = Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def prompt_form(value: Any) -> str | None:
    """The form of a field that has several. Tags are in <> so that errors can leave them out of the field's name."""
    if isinstance(value, str):
        return "<string>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<id lists>"
    return "<ids>" if isinstance(first, int) and not isinstance(first, bool) else "<list>"


class TextPart(Strict):
    """A content part with text; text models accept no other kind."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("<string>")]
            | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
            choice_of("a string or a list of text parts", text_form),
        ]
        | None
    ) = None
    """May be missing in an assistant's message with tool calls."""
    name: str | None = Field(None, max_length=256)
    tool_calls: list[Call] | None = Field(None, max_length=MAX_CALLS, fail_fast=True)
    tool_call_id: str | None = Field(None, min_length=1, max_length=MAX_CALL_ID_CHARS)
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """The content as one string; parts are separate lines."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Strict):
    """A JSON schema that the answer conforms to."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = Field(None, max_length=4096)
    strict: bool | None = Field(None, description="Answers conform to the schema in any case.")


class ResponseFormat(Strict):
    """The form of the answer: text, a JSON object, or JSON that conforms to a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Strict):
    """What the answer conforms to; vLLM's field of this name. Exactly one of the fields is set."""

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, min_length=1, description="In the syntax of Rust's regex library.")
    choice: list[ChoiceString] | None = Field(None, min_length=1, max_length=MAX_CHOICES, fail_fast=True)
    grammar: str | None = Field(None, min_length=1, description="Lark (llguidance's variant) or GBNF.")
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")


class SamplingFields(Strict):
    """The fields that chat and plain completions share."""

    model: str = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: (
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
            Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
        ]
        | None
    ) = Field(None, max_length=MAX_LOGIT_BIAS)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    n: int | None = Field(None, ge=1)
    stop: (
        Annotated[
            Annotated[StopString, Tag("<string>")]
            | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<list>")],
            choice_of("a string or a list of strings", text_form),
        ]
        | None
    ) = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_IDS, fail_fast=True)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=1024)
    resumable: bool | None = None
    """Whether the generation goes on when the client leaves, so that it can come back."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple, in whichever form they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[TemplateFieldName, TemplateFieldValue] | None = Field(
        None, max_length=MAX_TEMPLATE_FIELDS
    )


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("<list>")]
        | Annotated[IdList, Tag("<ids>")]
        | Annotated[list[IdList], Field(min_length=1, fail_fast=True), Tag("<id lists>")],
        choice_of("a string, a list of strings, a list of token ids or a list of lists of token ids", prompt_form),
    ]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, in whichever form they were given."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt or messages."""

    model: str = Field(min_length=1, max_length=256)
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str = Field(min_length=1, max_length=256)
    tokens: list[TokenId] = Field(max_length=MAX_IDS, fail_fast=True)
