"""The texts of tokens as they stand in JSON."""

from collections.abc import Callable

from pydantic_core import to_json

_LIMIT = 1 << 16
"""Most tokens that are kept; few texts use more of a vocabulary."""


class Pieces(dict[int, bytes | None]):
    """By token: its own text as JSON without quotes; None if it has none. Read it with `pieces[token_id]`, which finds
    out what is not known yet.

    Args:
        token_text: as `Tokenizer.token_text`.
    """

    def __init__(self, token_text: Callable[[int], str | None]) -> None:
        super().__init__()
        self._token_text = token_text

    def __missing__(self, token_id: int) -> bytes | None:
        text = self._token_text(token_id)
        if len(self) >= _LIMIT:
            self.clear()
        piece = self[token_id] = None if text is None else to_json(text)[1:-1]
        return piece
