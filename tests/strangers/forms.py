"""What the strangers ask for: forms of answers, tools, and the answer of the scripted system."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "reference"
PROMPT = "It was a dark night, and"
MESSAGES = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": PROMPT}]


class Night(BaseModel):
    """A night, short enough for a small model."""

    model_config = ConfigDict(extra="forbid")

    dark: bool
    hour: Annotated[int, Field(ge=0, le=23)]
    place: Literal["moor", "house", "sea"]


class Weather(BaseModel):
    """Gives the weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Gives the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}},
            "required": ["numbers"],
        },
    },
}
TOOLS = [WEATHER, ADD]
REASONING = "Two questions."
TEXT = "I look."
CALLS = [("weather", {"city": "Paris", "days": 2}), ("add", {"numbers": [1, 2]})]
"""What the scripted system says, whatever it is asked."""
