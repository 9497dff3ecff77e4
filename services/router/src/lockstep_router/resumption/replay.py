"""Makes the deltas of an answer again from its journal, after any position. It depends on nothing else."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from lockstep_api.v1 import inference_pb2, worker_pb2

from lockstep_router.generation.choices import Choice, Delta
from lockstep_router.journals import ChoiceLog, RequestRecord
from lockstep_router.resumption.position import Position, no_position
from lockstep_router.text.tokenizer import Tokenizer

_TOKENS_AT_ONCE = 256
"""Tokens that are turned into text without a pause: a few milliseconds at most."""


class Replay:
    """Turns the logs of a stream's choices into deltas."""

    def __init__(self, record: RequestRecord, logs: Sequence[ChoiceLog], tokenizer: Tokenizer) -> None:
        self._logs = logs
        self._choices = [
            Choice(
                index,
                tokenizer,
                record.stops,
                record.parsing,
                each.stream_id,
                preceding=record.prompts[index // record.choices_per_prompt] if record.continues_prompts else (),
                min_tokens=each.sampling.min_tokens,
            )
            for index, each in enumerate(record.choices)
        ]
        self._fed = [0] * len(record.choices)
        self._is_stepwise = record.style.kind == "responses"
        """Whether each token's delta is made by itself: numbered events must not depend on how tokens arrive."""
        self.skipped: list[Delta] = []
        """The deltas before the client's position, if their events have to be counted."""
        self._unsaid: list[Delta] = []
        """Finishes that were found before the client's position, and that it does not have."""
        alternatives = max(each.sampling.logprobs if record.style.logprobs else 0 for each in record.choices)
        self._at_once = max(8, _TOKENS_AT_ONCE // (1 + 2 * alternatives))

    @property
    def is_complete(self) -> bool:
        """Whether all deltas have been taken."""
        return not self._unsaid and all(choice.is_finished for choice in self._choices)

    @property
    def completion_tokens(self) -> int:
        """Tokens of the deltas so far, those before the position included."""
        return sum(choice.tokens for choice in self._choices)

    @property
    def reasoning_tokens(self) -> int:
        """Those of them that are reasoning."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    def is_behind(self, position: Position) -> bool:
        """Whether the stream may still reach a position that it has not reached."""
        return any(
            not log.finish and (tokens > len(log.ids) or has_finish)
            for log, tokens, has_finish in zip(self._logs, position.tokens, position.finished, strict=True)
        )

    async def skip(self, position: Position, field: str) -> None:
        """Go to a position.

        Raises:
            LockstepError: INVALID_REQUEST, naming the field: the stream has not reached it.
        """
        for index, tokens in enumerate(position.tokens):
            log, has_finish = self._logs[index], position.finished[index]
            if tokens > len(log.ids) or (has_finish and not (log.finish and tokens == len(log.ids))):
                raise no_position(field)
            if tokens > 0 or has_finish:
                await self._skip_choice(index, tokens, has_finish=has_finish)

    async def _skip_choice(self, index: int, tokens: int, *, has_finish: bool) -> None:
        choice, deltas = self._choices[index], list[Delta]()
        while self._fed[index] < tokens:
            deltas = self._feed(index, min(tokens - self._fed[index], self._at_once), may_finish=has_finish)
            self._note_skipped(deltas, has_finish=has_finish)
            await asyncio.sleep(0)
        if has_finish and not choice.is_finished:
            self._note_skipped(self._feed(index, 0, may_finish=True), has_finish=True)
        if choice.is_finished and not has_finish and deltas:
            self._unsaid.append(Delta(index, "", choice.tokens, deltas[-1].finish_reason))

    def _note_skipped(self, deltas: list[Delta], *, has_finish: bool) -> None:
        if self._is_stepwise:
            self.skipped += deltas if has_finish else [replace(delta, finish_reason=None) for delta in deltas]

    def take(self) -> list[Delta]:
        """The next deltas: all of a few tokens that are there, or the first ones of many. Empty: there are none now."""
        deltas, self._unsaid = self._unsaid, []
        room = self._at_once
        for index, log in enumerate(self._logs):
            count = min(len(log.ids) - self._fed[index], room)
            if self._choices[index].is_finished or (not count and (not log.finish or self._fed[index] < len(log.ids))):
                continue
            room -= count
            deltas += self._feed(index, count, may_finish=True)
        return deltas

    @property
    def has_more(self) -> bool:
        """Whether there is something to take."""
        return any(
            not choice.is_finished and (fed < len(log.ids) or bool(log.finish))
            for choice, fed, log in zip(self._choices, self._fed, self._logs, strict=True)
        )

    def _feed(self, index: int, count: int, *, may_finish: bool) -> list[Delta]:
        if self._is_stepwise:
            log = self._logs[index]
            # The token that stopped an answer comes with the finish: by itself it would have a text.
            is_stopped = log.finish == inference_pb2.FINISH_REASON_STOP and self._fed[index] + count == len(log.ids)
            last = 1 if may_finish and is_stopped and count else 0
            made = [self._feed_at_once(index, 1, may_finish=False) for _ in range(count - last)]
            made += [self._feed_at_once(index, last, may_finish=True)] if may_finish else []
        else:
            made = [self._feed_at_once(index, count, may_finish=may_finish)]
        return [delta for delta in made if delta is not None]

    def _feed_at_once(self, index: int, count: int, *, may_finish: bool) -> Delta | None:
        log, begin = self._logs[index], self._fed[index]
        end = self._fed[index] = begin + count
        return self._choices[index].feed(
            worker_pb2.StreamTokens(
                ids=log.ids[begin:end],
                logprobs=log.logprobs[begin:end],
                finish=log.finish if may_finish and end == len(log.ids) else 0,  # type: ignore[arg-type]
                cached_tokens=log.cached_tokens,
            )
        )
