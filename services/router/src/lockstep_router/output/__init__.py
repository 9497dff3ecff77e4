"""Finds reasoning and tool calls in a model's text.

Each parser is a state machine over characters: what it gives depends on the text alone, not on how the text was cut
into pieces. So a stream that moves to another worker, or that is resumed, has the same parts. It knows no model, no
token and no API.
"""

from lockstep_router.output.formats import ModelFormats, OutputFormat
from lockstep_router.output.parser import OutputParser
from lockstep_router.output.parts import CallArguments, CallName, Content, Part, Reasoning

__all__ = [
    "CallArguments",
    "CallName",
    "Content",
    "ModelFormats",
    "OutputFormat",
    "OutputParser",
    "Part",
    "Reasoning",
]
