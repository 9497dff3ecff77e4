"""The parts of request bodies for tools, tool calls and values for the chat template."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from lockstep_router.faces.openai.schema_base import JsonObject, Strict, choice_of, object_form, scalar_form

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

    name: FunctionName = Field(description="Its name.")
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS, description="What it does, for the model.")
    parameters: JsonObject | None = Field(None, description="A JSON schema of its arguments.")
    strict: bool | None = Field(
        None, description="Arguments conform to the schema with `auto` too; those of a required call do in any case."
    )


class FunctionTool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition = Field(description="The function.")


class FunctionReference(Strict):
    """The name of a function."""

    name: FunctionName = Field(description="One of those in `tools`.")


class NamedToolChoice(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionReference = Field(description="The function.")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedToolChoice, Tag("<object>")],
    choice_of("none, auto, required or a function", object_form),
]


class CalledFunction(Strict):
    """The function of a call, and its arguments as JSON text."""

    name: FunctionName = Field(description="Its name.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class Call(Strict):
    """A call that an earlier answer had."""

    id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS, description="The call's id, as the answer had it.")
    type: Literal["function"] = "function"
    function: CalledFunction = Field(description="The function and its arguments.")
    index: int | None = Field(
        None,
        ge=0,
        lt=MAX_CALLS,
        description="Changes nothing: clients that put an answer together from its pieces may leave it there.",
    )
