"""What all schemas of request bodies have in common."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field
from pydantic_core import PydanticCustomError

ModelName = Annotated[str, Field(min_length=1, max_length=256, description="The model's name, as in `/v1/models`.")]


def finite(value: Any) -> Any:
    """The value. In it no number may be infinite, as the parser makes those that are too large: JSON has no such
    numbers, so no text of them says what the client has sent.
    """
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() as fields:
                waiting += fields.values()
            case list() as entries:
                waiting += entries
            case float() as number if not math.isfinite(number):
                raise PydanticCustomError("infinite", "Input has a number that is too large")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(finite)]
"""An object of any fields."""


class Strict(BaseModel):
    """Base of all bodies: no type conversions, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class GenerationFields(Strict):
    """The model, and how its tokens are chosen: what the client does not set is as the model's publisher says."""

    model: ModelName
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description="0: always the most likely token. Default: the model's, or 1.",
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Only the most likely tokens whose probabilities add up to this. Default: the model's, or 1.",
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        lt=1 << 31,
        description="Only so many most likely tokens; 0 and -1: all. Default: the model's, or all.",
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Only tokens at least this share as likely as the most likely one. Default: the model's, or 0.",
    )


def choice_of(what: str, form: Any) -> Discriminator:
    """The discriminator of a field that has several forms; `what` names them in errors.

    `form` gives a value's tag. Tags are in <> so that errors can leave them out of the field's name.
    """
    return Discriminator(form, custom_error_type="wrong_form", custom_error_message=f"Input should be {what}")


def text_form(value: Any) -> str | None:
    """The tag of a string or a list."""
    return "<string>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def object_form(value: Any) -> str | None:
    """The tag of a string or an object."""
    return "<string>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None


def scalar_form(value: Any) -> str | None:
    """The tag of a value that is no list or object."""
    match value:
        case bool():
            return "<bool>"
        case int():
            return "<int>"
        case float():
            return "<float>"
        case str():
            return "<string>"
        case _:
            return None
