"""The part of a step that belongs to one sequence: the tokens that are computed, and what the result says of them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep_engine.plan import Result, StepLogprobs
from lockstep_engine.request import Logprobs, PromptLogprobs, PromptScores, TokenLogprob
from lockstep_engine.sequence import Sequence


class Chunk(NamedTuple):
    """The tokens of one sequence that a step computes."""

    sequence: Sequence
    start: int
    tokens: int
    samples: bool
    sampling_row: int
    scored: range
    """Prompt positions whose log probabilities this step computes."""
    completes: bool
    """It is the last part of a text whose embedding is wanted."""


def masks_of(chunks: list[Chunk]) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
    """`masked` and `masks` of a plan."""
    sampling = [chunk.sequence.constraint for chunk in chunks if chunk.samples]
    found = {index: each.mask for index, each in enumerate(sampling) if each is not None and each.mask is not None}
    if not found:
        return None, None
    return np.array(list(found), dtype=np.int32), np.stack(list(found.values()))


def targets_of(chunks: list[Chunk]) -> NDArray[np.int32] | None:
    """For each token of the step the id that follows it if that id has to be scored, else -1. None: no id is."""
    if not any(chunk.scored for chunk in chunks):
        return None
    ids = np.full(sum(chunk.tokens for chunk in chunks), -1, dtype=np.int32)
    end = 0
    for chunk in chunks:
        begin, end = end, end + chunk.tokens
        for position in chunk.scored:
            ids[begin + position - 1 - chunk.start] = chunk.sequence.tokens[position]
    return ids


def prompt_logprobs(chunk: Chunk, result: Result, first: int) -> PromptLogprobs | None:
    """A chunk's part of the result's scores, which begins with score `first`."""
    if not chunk.scored:
        return None
    assert result.target_logprobs is not None
    assert result.target_ranks is not None
    part = slice(first, first + len(chunk.scored))
    vocabulary = result.vocabulary_logprobs
    if chunk.sequence.request.sampling.prompt_scores is not PromptScores.VOCABULARY:
        vocabulary = None
    return PromptLogprobs(
        chunk.scored.start,
        result.target_logprobs[part],
        result.target_ranks[part],
        None if vocabulary is None else vocabulary[part],
    )


def token_logprobs(token: int, entry: StepLogprobs) -> Logprobs:
    """The log probabilities of a sampled token, as a step gives them."""
    top = tuple(TokenLogprob(id_, value) for id_, value in zip(entry.top_ids, entry.top_logprobs, strict=True))
    return Logprobs(TokenLogprob(token, entry.chosen), top)
