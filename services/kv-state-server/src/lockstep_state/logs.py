"""The tokens of one choice, and the rules for adding to them: no gap, no other tokens, nothing after the end but the
mark that the choice was continued inexactly.
"""

from array import array
from dataclasses import dataclass, field

from lockstep_api.v1 import state_pb2

GAP = state_pb2.WRITE_OUTCOME_GAP
CONFLICT = state_pb2.WRITE_OUTCOME_CONFLICT
OK = state_pb2.WRITE_OUTCOME_OK


@dataclass
class Log:
    """What one choice has so far."""

    ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[bytes] = field(default_factory=list)
    """Serialized, one for each id, or none."""
    finish: int = 0
    cached_tokens: int = 0
    inexact: bool = False
    numerics: str = ""
    unproven: bool = False

    def check(self, piece: state_pb2.Piece) -> state_pb2.WriteOutcome:
        """Whether a piece can be added: OK, GAP or CONFLICT."""
        known = len(self.ids) - piece.position
        if known < 0:
            return GAP
        count = len(piece.ids)
        if self.ids[piece.position : piece.position + count] != array("I", piece.ids[:known]):
            return CONFLICT
        if self.finish:
            is_other = count > known or piece.finish not in (0, self.finish)
        else:
            is_other = bool(piece.finish) and known > count  # tokens follow the end
        is_uneven = count > known and bool(self.ids) and bool(self.logprobs) != bool(piece.logprobs)
        return CONFLICT if is_other or is_uneven else OK

    def is_news(self, piece: state_pb2.Piece) -> bool:
        """Whether a piece that can be added has anything that is not there."""
        is_longer = piece.position + len(piece.ids) > len(self.ids)
        return is_longer or bool(piece.finish and not self.finish) or (piece.inexact and not self.inexact)

    def rest(self, piece: state_pb2.Piece) -> state_pb2.Piece:
        """A piece that can be added, without the tokens and the finish that are there."""
        known = len(self.ids) - piece.position
        if known == 0 and not self.finish:
            return piece
        rest = state_pb2.Piece()
        rest.CopyFrom(piece)
        rest.position = len(self.ids)
        del rest.ids[:known]
        del rest.logprobs[:known]
        if self.finish:
            rest.ClearField("finish")
        return rest

    def add(self, piece: state_pb2.Piece) -> None:
        """Add a piece that begins where the log ends."""
        self.ids.extend(piece.ids)
        self.logprobs.extend(each.SerializeToString() for each in piece.logprobs)
        self.finish = self.finish or piece.finish
        self.cached_tokens = piece.cached_tokens
        self.inexact = self.inexact or piece.inexact
        self.numerics = self.numerics or piece.numerics
        self.unproven = self.unproven or piece.unproven
