"""A stream's place in its grammar: which tokens may come next.

Most masks take some ten microseconds, less than it takes to wake a thread: the driver computes these itself. Others are
computed in threads, while the ranks and the driver go on with other streams.

The tokens that are allowed are a pure function of the grammar and of the tokens so far. So a stream that is preempted
keeps its place, and one that moves to another worker gets the same place by replaying its tokens.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from lockstep_common.cpu_limit import usable_cpus
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from numpy.typing import NDArray

from lockstep_engine.deep_threads import DeepThreads
from lockstep_engine.plan import mask_words
from lockstep_engine.request import GrammarKind, SamplingParams

logger = logging.getLogger("lockstep.engine")

SLOW_S = 0.005
"""CPU time for one token above which a grammar gets the thread for slow ones. Quick ones never wait for it."""
QUICK_S = 0.001
"""CPU time for one token after which the driver never computes a mask of this stream again: threads do. So a stream can
hold up others once."""
_QUICK_CHARS = 4096
"""Longest text of a grammar for whose masks the driver's stack is deep enough in any case."""
DRIVER_S = 0.001
"""Time in a step for which the driver computes masks; threads compute the others."""
_MAX_THREADS = 4
_MAX_REASON_CHARS = 300


class Matcher(Protocol):
    """The state of a compiled grammar; llguidance's `LLMatcher`."""

    def consume_token(self, sampled_token: int) -> bool: ...  # noqa: D102
    def try_consume_tokens(self, tokens: list[int]) -> int: ...  # noqa: D102
    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...  # noqa: D102
    def is_error(self) -> bool: ...  # noqa: D102
    def get_error(self) -> str: ...  # noqa: D102


class Vocabulary:
    """The tokens that masks are about.

    Args:
        size: of the model's vocabulary.
        tokenizer_size: of the tokenizer's, which may be larger.
        eos_ids: the model's end-of-text ids.
    """

    def __init__(self, size: int, tokenizer_size: int, eos_ids: Iterable[int]) -> None:
        self.size = size
        self.eos_ids = tuple(eos_ids)
        self._words = mask_words(size)
        self._matcher_words = mask_words(max(size, tokenizer_size))

    def compute(self, matcher: Matcher) -> NDArray[np.int32]:
        """The tokens [words] that a grammar allows next (see `Plan.masks`)."""
        words = np.zeros(self._matcher_words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        words = words[: self._words]
        if self.size % 32:
            words[-1] &= (1 << self.size % 32) - 1
        return words


class Constraint:
    """One stream's grammar and its place in it. Only the thread that advances it changes it.

    Args:
        matcher: the grammar at its beginning; it belongs to this constraint.
        sampling: of the stream.
        vocabulary: of the model.
        threads: what computes masks later.
        emitted_ids: output of earlier attempts.

    Raises:
        LockstepError: INVALID_REQUEST, the grammar refuses one of `emitted_ids`, or allows no token at all.
    """

    def __init__(
        self,
        matcher: Matcher,
        sampling: SamplingParams,
        vocabulary: Vocabulary,
        threads: "MaskThreads",
        emitted_ids: Sequence[int] = (),
    ) -> None:
        assert sampling.grammar is not None
        self._matcher = matcher
        self._sampling = sampling
        self._field = sampling.grammar.field
        self._vocabulary = vocabulary
        self._threads = threads
        self._emitted = len(emitted_ids)
        self.mask: NDArray[np.int32] | None = None
        """The tokens that may come next (see `Plan.masks`); None while they are being computed."""
        self.error: LockstepError | None = None
        """Why there will be no further mask."""
        self.is_slow = False
        """Its last token took much time."""
        # Among context-free grammars are ambiguous ones whose masks take a tenth of a second.
        is_free = sampling.grammar.kind is GrammarKind.LARK
        self.is_quick = len(sampling.grammar.text) <= _QUICK_CHARS and not is_free
        """The driver may compute its masks: none has taken much time."""
        began_s = time.thread_time()
        taken = matcher.try_consume_tokens(list(emitted_ids))
        if taken < len(emitted_ids):
            raise invalid("emitted_ids", f"has a token at position {taken} that the grammar does not allow")
        self.mask = self._compute()
        self.is_slow = time.thread_time() - began_s > SLOW_S

    def advance(self, token: int) -> None:
        """Begin to compute the mask after the next token. The last mask must have been used."""
        self.mask = None
        self._threads.start(self, token)

    def consume(self, token: int) -> None:
        """Compute the mask after the next token, or set `error`."""
        began_s = time.thread_time()
        try:
            if not self._matcher.consume_token(token):
                raise self._failure()
            self._emitted += 1
            mask = self._compute()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            self.error = as_failure(error)
            return
        took_s = time.thread_time() - began_s
        self.is_slow = took_s > SLOW_S
        self.is_quick = self.is_quick and took_s <= QUICK_S
        self.mask = mask

    def _compute(self) -> NDArray[np.int32]:
        words = self._vocabulary.compute(self._matcher)
        if self._matcher.is_error():
            raise self._failure()
        if not words.any():
            raise invalid(self._field, "allows no text that the model's tokens can make here")
        sampling = self._sampling
        is_short = self._emitted < sampling.min_tokens
        if is_short or sampling.ignore_eos:
            words = _without(words, self._vocabulary.eos_ids)
        if is_short:
            words = _without(words, sampling.stop_token_ids)
        return words

    def _failure(self) -> LockstepError:
        return invalid(self._field, f"cannot be followed further: {describe(self._matcher)}")


class MaskThreads:
    """What computes masks, and the driver's view of it: what is still being computed.

    Args:
        on_change: called from a thread when masks are ready for which `settle` did not wait, or if a constraint fails.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._quick = DeepThreads("grammar", max(1, min(_MAX_THREADS, int(usable_cpus()) // 2)))
        self._slow = DeepThreads("grammar-slow", 1)
        self._settled = threading.Condition()
        self._pending = 0
        """Masks that are being computed, except those of slow grammars."""
        self._driver_s = 0.0
        """Time in this step for which the driver has computed masks."""
        self._is_missed = False
        """The driver has stopped waiting for them."""
        self.has_failed = False
        """A constraint has failed since the driver last set this to False."""

    def start(self, constraint: Constraint, token: int) -> None:
        """Compute a constraint's mask after a token, or begin to."""
        if constraint.is_quick and self._driver_s < DRIVER_S:
            began_s = time.perf_counter()
            constraint.consume(token)
            self._driver_s += time.perf_counter() - began_s
            self._report(constraint, is_missed=False)
            return
        try:
            if constraint.is_slow:
                self._slow.put(lambda: self._consume_slowly(constraint, token))
                return
            self._quick.start()
        except RuntimeError:  # the process may have no more threads
            constraint.error = LockstepError(ErrorCode.OVERLOADED, "no thread can be started for its grammar")
            self._report(constraint, is_missed=True)
            return
        with self._settled:
            self._pending += 1
        self._quick.put(lambda: self._consume(constraint, token))

    def begin_step(self) -> None:
        """Give the driver time for masks again."""
        self._driver_s = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether no masks are being computed, except those of slow grammars."""
        return not self._pending

    def settle(self, timeout_s: float) -> None:
        """Wait, but not longer than `timeout_s`, until masks are ready, except those of slow grammars."""
        with self._settled:
            self._is_missed = not self._settled.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> None:
        """End the threads."""
        self._quick.close()
        self._slow.close()

    def _consume(self, constraint: Constraint, token: int) -> None:
        constraint.consume(token)
        with self._settled:
            self._pending -= 1
            is_missed = not self._pending and self._is_missed
            if not self._pending:
                self._is_missed = False
                self._settled.notify()
        self._report(constraint, is_missed=is_missed)

    def _consume_slowly(self, constraint: Constraint, token: int) -> None:
        constraint.consume(token)
        self._report(constraint, is_missed=True)

    def _report(self, constraint: Constraint, *, is_missed: bool) -> None:
        if constraint.error is not None:
            self.has_failed = True
        if is_missed or constraint.error is not None:
            self._on_change()


def as_failure(error: BaseException) -> LockstepError:
    """The error of a request for what was raised for its grammar."""
    if isinstance(error, LockstepError):
        return error
    logger.error("a grammar failed: %s", type(error).__name__)
    if isinstance(error, MemoryError):
        return LockstepError(ErrorCode.OVERLOADED, "there is no memory for its grammar")
    return LockstepError(ErrorCode.INTERNAL, "the library for grammars failed")


def describe(matcher: Matcher) -> str:
    """Why a matcher is in its error state, in one short line."""
    reason = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return reason[:_MAX_REASON_CHARS] or "unknown reason"


def _without(words: NDArray[np.int32], ids: Iterable[int]) -> NDArray[np.int32]:
    """A mask without some tokens; the mask itself if nothing else is left."""
    others = words.copy()
    bits = others.view(np.uint32)
    for token in ids:
        bits[token // 32] &= ~np.uint32(1 << token % 32)
    return others if others.any() else words
