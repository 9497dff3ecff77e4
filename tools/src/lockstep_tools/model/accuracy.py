"""How well an engine predicts a text: perplexity over windows, the divergence of one engine's distributions from
another's, and whether a string given earlier is recalled.

Plain numpy over the log probabilities that an engine gives to prompts, so all of it goes through the paged cache, and
over as many ranks as the engine has.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from lockstep_engine import PromptLogprobs
from numpy.typing import NDArray

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NEEDLE_LETTERS = 24
_ROWS_AT_ONCE = 256
"""Number of distributions held in float64 at a time: 256 MiB for a vocabulary of 128k."""


class Scorer(Protocol):
    """The engine to measure: `lockstep_engine.Engine`, or a double of it."""

    def score(self, prompt: Sequence[int], *, vocabulary: bool = False) -> PromptLogprobs:
        """Log probabilities of the prompt's tokens from the second on."""
        ...


@dataclass(frozen=True)
class Window:
    """A stretch of a text: what the model sees, and how many of its last tokens count."""

    begin: int
    end: int
    scored: int


def windows(tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Windows over a text so that each token but the first is scored once.

    Args:
        tokens: the tokens of the text.
        size: most tokens that come before a scored one.
        stride: tokens scored in a window after the first, which scores `size`. With `stride` equal to `size` windows do
            not overlap; with a smaller one each scored token has at least `size - stride` tokens before it.
    """
    done = 1
    while done < tokens:
        end = min(done + (stride if done > 1 else size), tokens)
        yield Window(max(0, end - 1 - size), end, end - done)
        done = end


@dataclass
class Perplexity:
    """Perplexity of a text under a model: the exponential of the mean loss."""

    tokens: int = 0
    nats: float = 0.0
    first_choices: int = 0
    """Number of tokens that were the most likely ones."""

    def add(self, scores: PromptLogprobs, scored: int) -> None:
        """Count the last `scored` tokens."""
        self.tokens += scored
        self.nats -= float(scores.tokens[-scored:].sum(dtype=np.float64))
        self.first_choices += int((scores.ranks[-scored:] == 1).sum())

    @property
    def value(self) -> float:
        """The perplexity."""
        return math.exp(self.nats / self.tokens)


@dataclass
class Divergence:
    """Kullback-Leibler divergence of a run's distributions from a reference's, one value a position, in nats."""

    kl: list[NDArray[np.float64]] = field(default_factory=list)
    contexts: list[NDArray[np.int64]] = field(default_factory=list)
    """Number of tokens before each position."""
    agreed: int = 0
    """Number of positions whose most likely token is the same."""

    def add(self, reference: PromptLogprobs, run: PromptLogprobs, scored: int) -> None:
        """Count the last `scored` positions."""
        assert reference.vocabulary is not None
        assert run.vocabulary is not None
        first = len(run.tokens) - scored
        self.kl.append(divergence(reference.vocabulary[first:], run.vocabulary[first:]))
        self.contexts.append(np.arange(first + 1, len(run.tokens) + 1))
        same = reference.vocabulary[first:].argmax(axis=-1) == run.vocabulary[first:].argmax(axis=-1)
        self.agreed += int(same.sum())

    def summary(self) -> dict[str, object]:
        """Mean, 99th percentile and most over all positions; the mean by the length of the context, in octaves."""
        kl, contexts = np.concatenate(self.kl), np.concatenate(self.contexts)
        octaves = []
        for upper in (64 * 2**n for n in range(1, 20)):
            inside = (contexts >= (upper // 2 if upper > 128 else 0)) & (contexts < upper)
            if inside.any():
                octaves.append(
                    {"context_below": upper, "positions": int(inside.sum()), "mean": float(kl[inside].mean())}
                )
        return {
            "positions": len(kl),
            "mean": float(kl.mean()),
            "p99": float(np.quantile(kl, 0.99)),
            "max": float(kl.max()),
            "same_first_choice": self.agreed / len(kl),
            "by_context": octaves,
        }


def divergence(reference: NDArray[np.float32], run: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(reference ‖ run) of each row of log probabilities, over the full vocabulary.

    Args:
        reference, run: [positions, vocabulary]; a token that the reference rules out counts nothing.

    Returns:
        [positions], not negative except by rounding.
    """
    out = np.empty(len(reference))
    for first in range(0, len(reference), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        p = reference[part].astype(np.float64)
        with np.errstate(invalid="ignore"):  # 0 * -inf, replaced
            terms = np.exp(p) * (p - run[part])
        out[part] = np.where(np.isneginf(p), 0.0, terms).sum(axis=-1)
    return out


def measure(
    engine: Scorer,
    ids: Sequence[int],
    plan: Iterable[Window],
    reference: Scorer | None = None,
    on_window: Callable[[Window], None] = lambda _: None,
) -> tuple[Perplexity, Perplexity | None, Divergence | None]:
    """Perplexity of an engine; with a reference also the reference's, and the divergence of the engine from it."""
    ours = Perplexity()
    theirs, apart = (None, None) if reference is None else (Perplexity(), Divergence())
    for window in plan:
        text = ids[window.begin : window.end]
        scores = engine.score(text, vocabulary=reference is not None)
        ours.add(scores, window.scored)
        if reference is not None and theirs is not None and apart is not None:
            expected = reference.score(text, vocabulary=True)
            theirs.add(expected, window.scored)
            apart.add(expected, scores, window.scored)
        on_window(window)
    return ours, theirs, apart


@dataclass(frozen=True)
class Needle:
    """A prompt that has a string somewhere and ends with the same string; and its control."""

    prompt: list[int]
    control: list[int]
    """The prompt with another string placed earlier."""
    answer: int
    """Number of tokens at the end that only the string placed earlier predicts."""


@dataclass
class Recall:
    """Recall of needles at one place."""

    context: int
    depth: float
    trials: int = 0
    recalled: int = 0
    """Answers of which each token was the most likely one: greedy decoding would have given them."""
    tokens: int = 0
    first_choices: int = 0
    nats: float = 0.0
    control_nats: float = 0.0

    def add(self, needle: Needle, scores: PromptLogprobs, control: PromptLogprobs) -> None:
        """Count a trial."""
        right = scores.ranks[-needle.answer :] == 1
        self.trials += 1
        self.recalled += bool(right.all())
        self.tokens += needle.answer
        self.first_choices += int(right.sum())
        self.nats += float(scores.tokens[-needle.answer :].sum(dtype=np.float64))
        self.control_nats += float(control.tokens[-needle.answer :].sum(dtype=np.float64))

    def row(self) -> dict[str, float]:
        """The figures as a line of the table."""
        return {
            "context": self.context,
            "depth": self.depth,
            "trials": self.trials,
            "recalled": self.recalled / self.trials,
            "tokens_right": self.first_choices / self.tokens,
            "probability": math.exp(self.nats / self.tokens),
            "gain_nats": (self.nats - self.control_nats) / self.tokens,
        }


class Haystack:
    """Makes needles in a text; the same seed makes the same.

    Args:
        encode: text to token ids.
        ids: the text.
        seed: the seed of the strings and of the places in the text.
    """

    def __init__(self, encode: Callable[[str], list[int]], ids: Sequence[int], seed: int) -> None:
        self._encode = encode
        self._ids = ids
        self._random = random.Random(seed)

    def needle(self, context: int, depth: float) -> Needle:
        """A needle in `context` tokens in all, placed at `depth` of the hay (0: the beginning).

        Raises:
            ValueError: the context is too short for it, or the text for the context.
        """
        placed, other = self._string(), self._string()
        answer = max(1, len(placed) // 3)
        room = context - 2 * max(len(placed), len(other))
        if len(self._ids) < context:
            raise ValueError(f"the text has {len(self._ids)} tokens, too few for a context of {context}")
        if room < len(placed):
            raise ValueError(f"no needle fits into {context} tokens")
        start = self._random.randrange(len(self._ids) - room + 1)
        hay = list(self._ids[start : start + room])
        place = round(depth * room)
        return Needle(
            prompt=[*hay[:place], *placed, *hay[place:], *placed],
            control=[*hay[:place], *other, *hay[place:], *placed],
            answer=answer,
        )

    def _string(self) -> list[int]:
        return self._encode(" The pass key is " + "".join(self._random.choices(_LETTERS, k=_NEEDLE_LETTERS)))


def recall(engine: Scorer, hay: Haystack, context: int, depth: float, trials: int) -> Recall:
    """Place needles at one depth and measure their recall."""
    result = Recall(context, depth)
    for _ in range(trials):
        needle = hay.needle(context, depth)
        result.add(needle, engine.score(needle.prompt), engine.score(needle.control))
    return result
