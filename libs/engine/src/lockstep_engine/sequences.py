"""The requests of the scheduler: which wait, which run and in which sampling rows, and which changes of phase have to
be reported.

It knows nothing of blocks: its caller takes and releases those.
"""

from lockstep_engine.request import Phase, PhaseChange
from lockstep_engine.sequence import Sequence


class Sequences:
    """Waiting and running sequences.

    Args:
        max_seqs: most that run at once: number of sampling rows.

    Attributes:
        by_id: those that are not finished, by the ids of their requests.
        waiting: in order of precedence.
        running: those that hold blocks, each in a sampling row.
        ended: ids of requests whose last output has not been `delivered`.
        phases: by id of the request: changes that `take_phases` has not returned yet.
        arrivals: requests so far.
        short_of_blocks: in the last step, those that wait waited for blocks, not for their turn in a step.
        preemptions: running requests that had to wait again, since the start.
        prompt_tokens: tokens of the prompts of all requests that have begun to run.
        cached_tokens: those of them that were in the prefix cache.
    """

    def __init__(self, max_seqs: int) -> None:
        self._max_seqs = max_seqs
        self.by_id: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.ended: list[str] = []
        self.phases: dict[str, Phase] = {}
        self._free_rows = list(range(max_seqs - 1, -1, -1))
        self._added: list[Sequence] = []
        self._at_share: set[str] = set()
        """Tenants whose waiting requests wait for their share of the blocks."""
        self.short_of_blocks = False
        self.arrivals = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    @property
    def free_seqs(self) -> int:
        """Number of requests that have a sampling row free beside those that wait; 0 if these wait for blocks, but for
        their tenant's share.
        """
        return max(0, self.places - len(self.running) - len(self._queued))

    @property
    def places(self) -> int:
        """Number of requests that can run at once, as far as is known."""
        if self.short_of_blocks and any(not each.is_held for each in self._queued):
            return len(self.running)
        return len(self.running) + len(self._free_rows)

    @property
    def has_free_row(self) -> bool:
        """Whether one more sequence can run."""
        return bool(self._free_rows)

    @property
    def unended_ids(self) -> list[str]:
        """All requests whose last output has not been `delivered`."""
        return [*self.by_id, *self.ended]

    @property
    def constrained(self) -> bool:
        """Whether a running sequence has a grammar."""
        return any(sequence.constraint is not None for sequence in self.running)

    @property
    def unconstrained(self) -> bool:
        """Whether any request has no grammar."""
        return any(sequence.constraint is None for sequence in self.by_id.values())

    @property
    def backlog(self) -> int:
        """Tokens of prompts that have to be computed for requests that came first."""
        sequences = (*self.running, *(each for each in self._queued if not each.is_held))
        return sum(each.remaining for each in sequences if each.remaining > 1)

    @property
    def waiting_for_share(self) -> frozenset[str]:
        """Requests that wait for their tenant's share of the blocks. Those of other tenants do not wait for them."""
        return frozenset(each.request.id for each in self.waiting if each.request.tenant in self._at_share)

    def note_share(self, tenant: str, *, waits: bool) -> None:
        """Whether the first waiting request of a tenant waits for the tenant's share of the blocks alone: in its place
        another tenant's would start.
        """
        if not waits:
            self._at_share.discard(tenant)
        elif tenant not in self._at_share:
            self._at_share &= {each.request.tenant for each in self.waiting}  # forgets those that are gone
            self._at_share.add(tenant)

    def add(self, sequence: Sequence) -> None:
        """A new request waits.

        Raises:
            MemoryError: it does not.
        """
        self.arrivals += 1
        try:
            self.by_id[sequence.request.id] = sequence
            self._enqueue(sequence)
        except MemoryError:
            self.by_id.pop(sequence.request.id, None)
            self.waiting = [each for each in self.waiting if each is not sequence]
            raise

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence runs. There must be a free row."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._added.append(sequence)
        sequence.sampling_row = self._free_rows.pop()
        self.phases[sequence.request.id] = Phase.RUNNING

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence waits again."""
        self.preemptions += 1
        self._release_row(sequence)
        self.phases[sequence.request.id] = Phase.WAITING
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence is finished or cancelled."""
        if sequence.sampling_row >= 0:
            self._release_row(sequence)
        else:
            self.waiting.remove(sequence)
        del self.by_id[sequence.request.id]

    def start_over(self) -> None:
        """Let all wait, without KV and without tokens in flight."""
        for sequence in self.by_id.values():
            if sequence.sampling_row >= 0:
                self.phases[sequence.request.id] = Phase.WAITING
            sequence.sampling_row, sequence.computed, sequence.in_flight = -1, 0, 0
            sequence.hot, sequence.cold = [], []
            sequence.score_from = sequence.scores_delivered
        self.waiting = sorted(self.by_id.values(), key=lambda each: each.precedence)
        self.running, self._added, self._at_share = [], [], set()
        self.short_of_blocks = False
        self._free_rows = list(range(self._max_seqs - 1, -1, -1))

    def clear(self) -> None:
        """Forget all requests; `start_over` has to follow."""
        self.by_id, self.ended, self.phases = {}, [], {}

    def take_added(self) -> list[Sequence]:
        """Sequences that have got a sampling row since the last call, and still have it."""
        added, self._added = self._added, []
        return added

    def take_phases(self) -> list[PhaseChange]:
        """Changes since the last call: requests that began to run or were preempted, and those of whose prompts a step
        has computed a part.
        """
        phases, self.phases = self.phases, {}
        return [PhaseChange(request_id, phase) for request_id, phase in phases.items() if request_id in self.by_id]

    def delivered(self) -> None:
        """The outputs of the last step have reached the caller."""
        self.ended = []

    @property
    def _queued(self) -> list[Sequence]:
        """Waiting sequences, without those that wait for their tenant's share."""
        return [each for each in self.waiting if each.request.tenant not in self._at_share]

    def _enqueue(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda each: each.precedence)

    def _release_row(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.sampling_row)
        sequence.sampling_row = -1
        self.running.remove(sequence)
        self._added = [each for each in self._added if each is not sequence]
