"""Makes the outcomes of writes."""

from collections.abc import Sequence

from lockstep_api.v1 import state_pb2
from lockstep_api.v1.state_pb2 import WriteResult

from lockstep_state.backend import Write
from lockstep_state.logs import Log


def ok(epoch: int) -> WriteResult:
    """Written, now or before."""
    return WriteResult(outcome=state_pb2.WRITE_OUTCOME_OK, epoch=epoch)


def stale(epoch: int) -> WriteResult:
    """The stream has a higher epoch."""
    return WriteResult(outcome=state_pb2.WRITE_OUTCOME_STALE, epoch=epoch)


def of_choice(outcome: state_pb2.WriteOutcome, choice: int, length: int) -> WriteResult:
    """A piece cannot be added: GAP or CONFLICT, of a choice with so many tokens."""
    return WriteResult(outcome=outcome, choice=choice, length=length)


def plain(outcome: state_pb2.WriteOutcome) -> WriteResult:
    """An outcome that needs no more words."""
    return WriteResult(outcome=outcome)


def refusal(logs: Sequence[Log], pieces: Sequence[state_pb2.Piece]) -> WriteResult | None:
    """The outcome for the first piece that cannot be added; None if all can."""
    for piece in pieces:
        if piece.choice >= len(logs):
            return of_choice(state_pb2.WRITE_OUTCOME_CONFLICT, piece.choice, 0)
        log = logs[piece.choice]
        outcome = log.check(piece)
        if outcome != state_pb2.WRITE_OUTCOME_OK:
            return of_choice(outcome, piece.choice, len(log.ids))
    return None


def seal_refusal(logs: Sequence[Log], seal: bytes | None, write: Write) -> WriteResult | None:
    """The outcome for a write that would change a stream which has ended; None if it changes nothing."""
    if seal is None:
        return None
    is_news = any(logs[piece.choice].is_news(piece) for piece in write.pieces)
    return plain(state_pb2.WRITE_OUTCOME_SEALED) if is_news or write.seal not in (None, seal) else None
