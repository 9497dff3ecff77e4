"""The body of POST /v1/embeddings, and the request made from it."""

from typing import Annotated, Any, Literal

from lockstep_common.errors import invalid
from pydantic import Field, Tag

from lockstep_router.faces import identity
from lockstep_router.faces.identity import Origin
from lockstep_router.faces.openai.schema_base import ModelName, Strict, choice_of
from lockstep_router.faces.openai.schemas import IdList, prompt_form
from lockstep_router.generation.embedding import EmbeddingRequest
from lockstep_router.generation.request import PromptSource, TextPrompt, TokenPrompt
from lockstep_router.settings import RouterSettings


class EmbeddingBody(Strict):
    """POST /v1/embeddings."""

    model: ModelName
    input: Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("<list>")]
        | Annotated[IdList, Tag("<ids>")]
        | Annotated[list[IdList], Field(min_length=1, fail_fast=True), Tag("<id lists>")],
        choice_of("a string, a list of strings, a list of token ids or a list of lists of token ids", prompt_form),
    ] = Field(description="One or several texts, as text or as token ids.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Vectors are lists of numbers, or base64 of 32-bit floats (little-endian). Default: `float`."
    )
    dimensions: int | None = Field(
        None, ge=1, lt=1 << 31, description="Numbers in a vector, if the model offers this size. Default: all."
    )
    user: str | None = Field(
        None, max_length=1024, description="Requests with one value prefer one worker, as with `X-Session-ID`."
    )

    @property
    def inputs(self) -> list[str | list[int]]:
        """The texts as a list, in whichever form they were given."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def embedding_request(body: EmbeddingBody, origin: Origin, settings: RouterSettings) -> EmbeddingRequest:
    """The request of /v1/embeddings.

    Raises:
        LockstepError: INVALID_REQUEST, there are too many texts.
    """
    inputs = body.inputs
    if len(inputs) > settings.max_embedding_inputs:
        raise invalid("input", f"may have at most {settings.max_embedding_inputs} texts")
    return EmbeddingRequest(
        model=body.model,
        caller=identity.caller(origin, body.user),
        texts=tuple(
            _text(each, f"input[{index}]" if len(inputs) > 1 else "input") for index, each in enumerate(inputs)
        ),
        dimensions=body.dimensions,
    )


def _text(given: str | list[int], field: str) -> PromptSource:
    return TextPrompt(given, field) if isinstance(given, str) else TokenPrompt(given, field)
