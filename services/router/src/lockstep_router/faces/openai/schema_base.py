"""What all schemas of request bodies have in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator


class Strict(BaseModel):
    """Base of all bodies: no type conversions, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


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
