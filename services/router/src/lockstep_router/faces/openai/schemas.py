"""The request bodies: OpenAI's fields and a few extensions. Strictly typed, every field bounded."""

from typing import Annotated, Any, Literal

from lockstep_common.protocol import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from pydantic import AfterValidator, Field, Tag

from lockstep_router.faces.openai.schema_base import (
    GenerationFields,
    JsonObject,
    ModelName,
    Strict,
    choice_of,
    finite,
    text_form,
)
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
    text: str = Field(description="The text.")
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description="Changes nothing.")


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who says it. `developer` reaches the chat template as `system`."
    )
    content: (
        Annotated[
            Annotated[str, Tag("<string>")]
            | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
            choice_of("a string or a list of text parts", text_form),
        ]
        | None
    ) = Field(
        None,
        description="The text; parts are lines of one text. May be missing in an assistant's message with tool calls "
        "or a `refusal`, which is a line of its text, as parts of the type `refusal` are.",
    )
    name: str | None = Field(None, max_length=256, description="A name for the template.")
    tool_calls: list[Call] | None = Field(
        None, max_length=MAX_CALLS, fail_fast=True, description="Of an assistant: the calls that its answer had."
    )
    tool_call_id: str | None = Field(
        None, min_length=1, max_length=MAX_CALL_ID_CHARS, description="Of a tool: the call that this is the result of."
    )
    reasoning_content: str | None = Field(None, description="Of an assistant: the reasoning that its answer had.")

    @property
    def text(self) -> str:
        """The content as one string; parts are separate lines."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = Field(False, description="The last chunk has the usage.")
    include_obfuscation: bool | None = Field(None, description="Changes nothing.")


class JsonSchemaFormat(Strict):
    """A JSON schema that the answer conforms to."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="A name of the client's own; changes nothing.")
    schema_: JsonObject | None = Field(None, alias="schema", description="The JSON schema. Default: any JSON.")
    description: str | None = Field(None, max_length=4096, description="Changes nothing.")
    strict: bool | None = Field(None, description="Answers conform to the schema in any case.")


class ResponseFormat(Strict):
    """The form of the answer: text, a JSON object, or JSON that conforms to a schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON that conforms to a schema."
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="The schema, of the type `json_schema`.")


class StructuredOutputs(Strict):
    """What the answer conforms to; vLLM's field of this name. Exactly one of the fields is set."""

    json_: Annotated[str | dict[str, Any] | None, AfterValidator(finite)] = Field(
        None, alias="json", description="A JSON schema."
    )
    regex: str | None = Field(None, min_length=1, description="In the syntax of Rust's regex library.")
    choice: list[ChoiceString] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, fail_fast=True, description="One of these texts."
    )
    grammar: str | None = Field(None, min_length=1, description="Lark (llguidance's variant) or GBNF.")
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")


class SamplingFields(GenerationFields):
    """The fields that chat and plain completions share."""

    max_tokens: int | None = Field(
        None,
        ge=1,
        lt=1 << 31,
        description="Most tokens of an answer. Without it: what the context has room for in a conversation, else 16.",
    )
    min_tokens: int = Field(
        0,
        ge=0,
        lt=1 << 31,
        description="End-of-text and stop tokens cannot be chosen before this many tokens, and stop strings in their "
        "text do not end the answer.",
    )
    repetition_penalty: float | None = Field(
        None,
        gt=0,
        le=100,
        allow_inf_nan=False,
        description="Above 1, tokens of the prompt and of the answer become less likely. Default: the model's, or 1.",
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        description="Taken off a token's logit for each time that the answer has it. Default: 0.",
    )
    presence_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        description="Taken off a token's logit once the answer has it. Default: 0.",
    )
    logit_bias: (
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
            Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
        ]
        | None
    ) = Field(
        None,
        max_length=MAX_LOGIT_BIAS,
        description="By token id, as text: a number from -100 to 100 that is added to the token's logit.",
    )
    seed: int | None = Field(
        None,
        ge=-(1 << 63),
        lt=1 << 64,
        description="Equal requests with one seed have equal answers, on equal workers. Default: a random one.",
    )
    n: int | None = Field(
        None, ge=1, description="Answers to each prompt, at most `max_n` of the router's settings. Default: 1."
    )
    stop: (
        Annotated[
            Annotated[StopString, Tag("<string>")]
            | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<list>")],
            choice_of("a string or a list of strings", text_form),
        ]
        | None
    ) = Field(None, description="Texts that end the answer, which does not have them.")
    stop_token_ids: list[TokenId] | None = Field(
        None,
        max_length=MAX_STOP_IDS,
        fail_fast=True,
        description="Tokens that end the answer, whose text does not have them.",
    )
    ignore_eos: bool = Field(False, description="The answer goes on past the model's end-of-text tokens.")
    response_format: ResponseFormat | None = Field(None, description="The form of the answer.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the answer conforms to; not together with `response_format`."
    )
    stream: bool | None = Field(None, description="The answer comes in chunks, while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="Needs `stream`.")
    user: str | None = Field(
        None, max_length=1024, description="Requests with one value prefer one worker, as with `X-Session-ID`."
    )
    resumable: bool | None = Field(
        None, description="The generation goes on when the client leaves, so that it can come back."
    )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple, in whichever form they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="The conversation so far."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=1 << 31, description="OpenAI's newer name of `max_tokens`."
    )
    logprobs: bool | None = Field(None, description="The answer has the log probabilities of its tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="And those of so many most likely tokens; needs `logprobs`."
    )
    tools: list[FunctionTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="Functions that the model may call."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="`none`: no call, and the template gets no tools; `auto`: the model chooses; `required`, or a "
        "function: the answer is a call. Default: `auto`.",
    )
    parallel_tool_calls: bool | None = Field(None, description="`false`: the answer ends after its first call.")
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="For templates that use it; in others `none` turns reasoning off where the template can."
    )
    chat_template_kwargs: dict[TemplateFieldName, TemplateFieldValue] | None = Field(
        None, max_length=MAX_TEMPLATE_FIELDS, description="Further values for the chat template."
    )


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("<list>")]
        | Annotated[IdList, Tag("<ids>")]
        | Annotated[list[IdList], Field(min_length=1, fail_fast=True), Tag("<id lists>")],
        choice_of("a string, a list of strings, a list of token ids or a list of lists of token ids", prompt_form),
    ] = Field(description="One or several texts to continue, as text or as token ids.")
    echo: bool | None = Field(None, description="The answer begins with the prompt; not together with `logprobs`.")
    suffix: str | None = Field(
        None, description="The answer belongs between the prompt and this text, if the model can do that."
    )
    best_of: int | None = Field(
        None, ge=1, description="Answers that are generated to each prompt, of which the best `n` are returned."
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="The answer has the log probabilities of its tokens, and of so many most likely tokens.",
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, in whichever form they were given."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt or messages."""

    model: ModelName
    prompt: str | None = Field(None, description="A text. Exactly one of `prompt` and `messages` is needed.")
    messages: list[Message] | None = Field(
        None,
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="A conversation, which the model's chat template turns into a prompt.",
    )
    add_special_tokens: bool = Field(
        True, description="Of a prompt: with the special tokens that the model's files put around every text."
    )


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: ModelName
    tokens: list[TokenId] = Field(max_length=MAX_IDS, fail_fast=True, description="The token ids.")
