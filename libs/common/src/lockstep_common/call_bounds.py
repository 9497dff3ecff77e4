"""Bounds of a gRPC server's calls in progress: for all clients together, and for each of them.

A call counts until gRPC has sent its status. That may be long after its handler has ended: the status waits behind
messages that the client does not read, and a server cannot end such a call. Its client, or the end of the connection,
does. So what one client holds has to be bounded.

It is for services that have gRPC among their dependencies: this package has not.
"""

from collections import Counter
from urllib.parse import unquote

import grpc

from lockstep_common.errors import ErrorCode, LockstepError

_RETRY_AFTER_S = 1.0


class CallBounds:
    """Counts calls in progress, and refuses those beyond a bound.

    Args:
        what: the calls, in errors.
        most_each: calls of one client at a time.
        most: calls of all clients at a time; None: the server's own bound is enough.
        owner: one client, in errors.
    """

    def __init__(self, what: str, most_each: int, most: int | None = None, owner: str = "client") -> None:
        self._what = what
        self._most_each = most_each
        self._most = most
        self._owner = owner
        self._all = 0
        self._held: Counter[str] = Counter()

    def take(self, client: str, context: grpc.aio.ServicerContext) -> None:
        """Count a call until it is over.

        Args:
            client: names the client; if empty, it is not known, and the call counts in the bound of all clients only.
            context: of the call.

        Raises:
            LockstepError: OVERLOADED, the client or all clients have as many calls as they may; it is not counted.
        """
        if self._most is not None and self._all >= self._most:
            raise self._refusal(f"{self._most} {self._what} are in progress already, the limit for all")
        if client and self._held.get(client, 0) >= self._most_each:
            sentence = (
                f"{self._most_each} {self._what} of this {self._owner} are in progress already, the limit for one"
            )
            raise self._refusal(sentence)
        self._all += 1
        self._held[client] += 1
        context.add_done_callback(lambda _: self._give_back(client))

    def _give_back(self, client: str) -> None:
        self._all -= 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

    def _refusal(self, sentence: str) -> LockstepError:
        return LockstepError(ErrorCode.OVERLOADED, sentence, retry_after_s=_RETRY_AFTER_S)


def address_of(peer: str) -> str:
    """The client's address, without the port, in gRPC's name of a peer (`ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`);
    empty for others, such as those of Unix sockets.
    """
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""
