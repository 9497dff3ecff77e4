"""Decodes a growing list of token ids, and gives text as soon as it can no longer change."""

from collections.abc import Sequence

from lockstep_router.text.tokenizer import REPLACEMENT, Tokenizer

MAX_WAITING = 16
"""Largest number of tokens that wait for a character to be completed. A character has at most 4 bytes, so bytes that
are still undecodable after this many tokens stay so, except for the last few.
"""
_CONTEXT = 8
NONE_VISIBLE: frozenset[int] = frozenset()
_PRECEDING = 64
"""Ids before the first one among which those with a text are looked for."""
_TAIL_CHARS = 4


class Detokenizer:
    """Gives each token's text once, so that all pieces together are the decoding of all ids.

    Decoding is not a sum over tokens: bytes of one character may be spread over several, and some tokenizers treat the
    first token's leading space specially. Therefore a short window of earlier tokens is decoded together with the new
    one, and the difference is the new text. Text that ends in an unfinished character waits.

    Args:
        tokenizer: of the model.
        visible_ids: special tokens that have a text too; all others have none.
        preceding: ids whose text the text continues. Without them it begins a text, and many tokenizers drop the space
            that begins one.
    """

    def __init__(
        self, tokenizer: Tokenizer, visible_ids: frozenset[int] = NONE_VISIBLE, preceding: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._visible_ids = visible_ids
        self._window: list[int] = []
        self._context = 0  # tokens at the window's start whose text has been given and ended on a whole character
        self._given = 0  # characters of the window's text that have been given
        if preceding and not tokenizer.is_concatenation:
            self._follow(preceding)

    def _follow(self, ids: Sequence[int]) -> None:
        """Begin after these ids, as if their text had been given."""
        tokenizer, window = self._tokenizer, list[int]()
        for token_id in reversed(ids[-_PRECEDING:]):
            if token_id not in tokenizer.special_ids and tokenizer.token_bytes(token_id):
                window.append(token_id)
                if len(window) == _CONTEXT:
                    break
        while window and 0x80 <= tokenizer.token_bytes(window[-1])[0] < 0xC0:  # the rest of a character
            window.pop()
        window.reverse()
        # Bytes that are no character yet are left to their sender: the text does not complete their character.
        while window and (text := tokenizer.decode(window)).endswith(REPLACEMENT):
            window.pop()
        if window:
            self._window, self._context, self._given = window, len(window), len(text)

    def step(self, token_id: int) -> str:
        """The text that is final after this id: often the token's own text, sometimes none yet."""
        if len(self._window) == self._context and (own := self._tokenizer.token_text(token_id)) is not None:
            # The general way, below, comes to the same state and the same text, with two calls of the tokenizer.
            self._window, self._context, self._given = [token_id], 1, len(own)
            return own
        if token_id in self._tokenizer.special_ids or not self._tokenizer.token_bytes(token_id):
            return self._show(token_id) if token_id in self._visible_ids else ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if len(text) <= self._given:
            return ""
        if not text.endswith(REPLACEMENT):
            return self._give(text, len(text), keep_from=self._context)
        if len(self._window) - self._context < MAX_WAITING:
            return ""
        return self._give(text, max(self._given, len(text) - _TAIL_CHARS), keep_from=len(self._window) - _CONTEXT)

    @property
    def is_whole(self) -> bool:
        """Whether the text so far is given, and ends on a whole character."""
        return len(self._window) == self._context

    def skip(self) -> None:
        """Go on after tokens with a `token_text` of which others have given the text. `is_whole` holds before; no such
        token changes the text of those after it.
        """
        self._window, self._context, self._given = [], 0, 0

    def flush(self) -> str:
        """The text that still waits, with unfinished characters as U+FFFD. Call it once, at the end."""
        return "" if self.is_whole else self._tokenizer.decode(self._window)[self._given :]

    def rest_with(self, token_id: int) -> str:
        """All the text that is not given yet if this id is the last one."""
        if token_id in self._tokenizer.special_ids or not self._tokenizer.token_bytes(token_id):
            shown = self._tokenizer.token_bytes(token_id).decode() if token_id in self._visible_ids else ""
            return self.flush() + shown
        return self._tokenizer.decode([*self._window, token_id])[self._given :]

    def _show(self, token_id: int) -> str:
        """The text of a special token, after the text that still waits."""
        waiting, self._window, self._context, self._given = self.flush(), [], 0, 0
        return waiting + self._tokenizer.token_bytes(token_id).decode()

    def _give(self, text: str, end: int, *, keep_from: int) -> str:
        """Give the window's text up to `end` and forget the tokens before `keep_from`."""
        piece, waiting = text[self._given : end], len(text) - end
        self._window = self._window[keep_from:]
        self._context = len(self._window) if not waiting else 0
        self._given = len(self._tokenizer.decode(self._window)) - waiting
        return piece
