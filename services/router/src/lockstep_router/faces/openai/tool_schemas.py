"""The parts of request bodies for tools, tool calls and values for the chat template."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from lockstep_router.faces.openai.schema_base import Strict, choice_of, object_form, scalar_form

MAX_TOOLS = 128
MAX_CALLS = 128
"""Largest number of calls in one message."""
MAX_CALL_ID_CHARS = 256
MAX_DESCRIPTION_CHARS = 16 << 10
MAX_TEMPLATE_FIELDS = 16

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
TemplateFieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TemplateFieldValue = Annotated[
    Annotated[bool, Tag("<bool>")]
    | Annotated[int, Field(gt=-(1 << 31), lt=1 << 31), Tag("<int>")]
    | Annotated[float, Field(allow_inf_nan=False), Tag("<float>")]
    | Annotated[str, Field(max_length=256), Tag("<string>")],
    choice_of("a boolean, a number or a string", scalar_form),
]


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(Strict):
    """The name of a function."""

    name: FunctionName


class NamedToolChoice(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionReference


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedToolChoice, Tag("<object>")],
    choice_of("none, auto, required or a function", object_form),
]


class CalledFunction(Strict):
    """The function of a call, and its arguments as JSON text."""

    name: FunctionName
    arguments: str


class Call(Strict):
    """A call that an earlier answer had."""

    id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, ge=0, lt=MAX_CALLS)
    """Clients that put an answer together from its pieces may leave it there."""
