"""`prefix_aware`: a stream goes where the beginning of its prompt has been computed, unless that worker is too loaded.

The index holds hashes of the blocks of prompts that this router has sent to each worker, as in SGLang's router and
llm-d's approximate prefix scorer. It is a guess: workers do not report which blocks they still have, and other
routers' streams are not in it. A wrong guess costs computing the prompt again, nothing else.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh64_intdigest

from lockstep_router.policies.facts import Policy, RequestFacts, WorkerFacts
from lockstep_router.policies.hybrid import within_bound
from lockstep_router.policies.rendezvous import rank

BLOCK_TOKENS = 16
"""Tokens of a block: workers cache whole blocks of this size."""

_MAX_BLOCKS = 256
"""Blocks of a prompt that are looked at, from its beginning, so that a long prompt costs the router little."""

_LEAST_SHARE = 0.5
"""Share of these blocks that must be known on a worker. A short beginning that most prompts have in common, such as a
chat template's, would send all of them to the same worker (SGLang's `cache_threshold`)."""


class PrefixAware(Policy):
    """The longest known prefix among the workers that are within the bound of `hybrid`."""

    def __init__(self, load_bound: float, index_blocks: int) -> None:
        self._load_bound = load_bound
        self._index = PrefixIndex(index_blocks)

    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The worker within the bound that has most of the prompt; of equal ones, the one the session prefers.

        Workers that have less than half of the prompt count as having none of it.
        """
        within = {worker.worker_id: worker for worker in within_bound(workers, self._load_bound)}
        blocks = block_hashes(request)
        known = {worker_id: self._index.known(worker, blocks) for worker_id, worker in within.items()}
        least = max(1, _LEAST_SHARE * len(blocks))
        return max(
            rank(request.session, within), key=lambda worker_id: known[worker_id] if known[worker_id] >= least else 0
        )

    def note_sent(self, request: RequestFacts, worker: WorkerFacts) -> None:
        """Add the prompt's blocks to the index."""
        self._index.add(worker, block_hashes(request))


class PrefixIndex:
    """The blocks that workers have computed, as far as this router knows; the least recently used are dropped.

    A key combines a block's hash with the worker's life. So the blocks of an earlier life are never found, and they
    are dropped like others that are no longer used.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def known(self, worker: WorkerFacts, blocks: Sequence[int]) -> int:
        """How many of the blocks, from the first one on without a gap, the worker has."""
        life = _life_hash(worker)
        for count, block in enumerate(blocks):
            if block ^ life not in self._keys:
                return count
        return len(blocks)

    def add(self, worker: WorkerFacts, blocks: Sequence[int]) -> None:
        """Note that the worker has the blocks, and has used them just now."""
        life = _life_hash(worker)
        # The first block is the last one used: a prefix is dropped from its end, which leaves no gap.
        for block in reversed(blocks):
            self._keys[block ^ life] = None
            self._keys.move_to_end(block ^ life)
        while len(self._keys) > self._max_blocks:
            self._keys.popitem(last=False)


def block_hashes(request: RequestFacts) -> list[int]:
    """A hash of 64 bits for each whole block of the prompt, at most 256: of the tenant and all tokens to its end.

    The last token is left out: it is always computed, since the next token follows from it. The tenant is the salt of
    the chain, so that nobody learns from the choice of a worker what another tenant has sent.
    """
    tokens = array("I", request.prompt_ids[: _MAX_BLOCKS * BLOCK_TOKENS + 1])
    data = memoryview(tokens).cast("B")
    size = BLOCK_TOKENS * tokens.itemsize
    last = xxh64_intdigest(request.tenant.encode("utf-8", "surrogatepass"))
    hashes: list[int] = []
    for begin in range(0, (len(tokens) - 1) // BLOCK_TOKENS * size, size):
        last = xxh64_intdigest(data[begin : begin + size], seed=last)
        hashes.append(last)
    return hashes


def _life_hash(worker: WorkerFacts) -> int:
    return xxh64_intdigest(repr((worker.worker_id, *worker.life)).encode("utf-8", "surrogatepass"))
