"""Chooses what the next step computes: which sequences, and how many tokens of each.

Running sequences come first, in order of precedence; then waiting ones are admitted. A sequence that needs a block that
is not there preempts the least important ones.
"""

from lockstep_engine.block_tables import BlockTables
from lockstep_engine.blocks import BlockKey
from lockstep_engine.chunk import Chunk
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.limits import Limits
from lockstep_engine.matches import Hits, Match
from lockstep_engine.sequence import Sequence
from lockstep_engine.sequences import Sequences

_MOST_BLOCKS = 8192
"""No further sequence is admitted in a step after so many blocks were given keys or shared: some microseconds each,
and the driver does nothing else meanwhile."""


class StepChooser:
    """Chooses steps over one set of pools.

    Args:
        limits: of the scheduler.
        sequences: waiting and running ones; it starts and preempts them.
        blocks: the pools, and which sequences have their blocks.
    """

    def __init__(self, limits: Limits, sequences: Sequences, blocks: BlockTables) -> None:
        self._limits = limits
        self._sequences = sequences
        self.blocks = blocks
        self.current: Sequence | None = None
        """The request being scheduled: it ends if memory runs out."""

    def choose(self) -> list[Chunk]:
        """What the next step computes; each of its sequences has the blocks for it."""
        self.current = None
        self._sequences.short_of_blocks = False
        chunks: list[Chunk] = []
        budget = self._limits.max_batch_tokens
        preempted = False
        # Prompts, also those of important sequences, leave room in the step for those that decode. The first prompt
        # always advances, because a step may have at least as many tokens as sequences run.
        decoding = sum(sequence.remaining == 1 for sequence in self._sequences.running)
        for sequence in sorted(self._sequences.running, key=lambda each: each.precedence):
            if budget == 0:
                break
            decodes = sequence.remaining == 1
            decoding -= decodes
            if sequence.sampling_row < 0:  # preempted in this loop, for a more important one
                continue
            if self.blocks.is_loading(sequence):
                continue
            self.current = sequence
            count = self._count(sequence, budget if decodes else max(0, budget - decoding), chunks)
            if count == 0:
                continue
            count, has_preempted = self._make_room(sequence, count)
            preempted |= has_preempted
            if count:
                chunks.append(self._chunk(sequence, count))
                budget -= count
        if preempted:
            self._sequences.short_of_blocks = True
        else:
            self._admit(chunks, budget)
        return chunks

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting sequences, in order, until budget, sampling rows, blocks or time are used up."""
        at_limit: set[str] = set()  # tenants
        awaited: list[tuple[int, bytes]] = []  # blocks that running sequences compute and waiting ones lack
        blocks_left = _MOST_BLOCKS
        for sequence in list(self._sequences.waiting):
            tenant = sequence.request.tenant
            if budget == 0 or blocks_left <= 0 or not self._sequences.has_free_row:
                # Not looked up: it counts as if the prefix cache had nothing of it.
                self._sequences.short_of_blocks = not self.blocks.needs_of(sequence).fit(self.blocks.room_of_all)
                return
            # Smaller requests of a tenant do not overtake at its limit either, and to look up hundreds would take time.
            is_skipped = tenant in at_limit
            # Preempted while its last token was in flight; that comes with the next result.
            if sequence.in_flight and not is_skipped:
                self._sequences.short_of_blocks = True
                return
            # Blocks are on their way to it; or it was preempted, and its grammar is not ready for its next token.
            if is_skipped or sequence.is_held or not sequence.may_sample or self._lacks_any(sequence, awaited):
                continue
            self.current = sequence
            if self._count(sequence, budget, chunks) == 0:
                return
            keyed = len(sequence.keys)
            match = self.find_match(sequence)
            blocks_left -= len(sequence.keys) - keyed
            block = self._block_being_computed(match)
            if block is not None:
                awaited.append(block)
                self.blocks.matches.remember(sequence.request.id, match)
                continue  # wait and share its blocks
            has_room = match.takes.fit(self.blocks.room_of_all)
            is_at_limit = self.blocks.is_at_limit(tenant, match.takes)
            self._sequences.short_of_blocks = not has_room
            self._sequences.note_share(tenant, waits=is_at_limit and has_room)
            if is_at_limit:
                self.blocks.matches.remember(sequence.request.id, match)
                at_limit.add(tenant)
                continue  # its tenant must not hold up others
            if not has_room:
                self.blocks.matches.remember(sequence.request.id, match)
                return  # smaller requests do not overtake: a large one would never start
            blocks_left -= match.hits.usable
            self._start(sequence, match.keys, match.hits)
            if not self.blocks.is_loading(sequence):
                count = self.blocks.fitting(sequence, self._count(sequence, budget, chunks))
                self.blocks.grow(sequence, count)
                chunks.append(self._chunk(sequence, count))
                budget -= count

    def cacheable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of the blocks that it takes from the prefix cache if that has them."""
        count = self._cacheable(sequence)
        return self.keys(sequence)[:count] if count else []

    def _cacheable(self, sequence: Sequence) -> int:
        if not self._limits.prefix_cache or self._needs_every_token(sequence):
            return 0
        # The last token is always computed: its logits choose the next one.
        return (len(sequence.tokens) - 1) // BLOCK_SIZE

    def _needs_every_token(self, sequence: Sequence) -> bool:
        """Whether all tokens are computed, even if the prefix cache has their KV."""
        return sequence.scores_prompt or (sequence.request.embeds and self._limits.mean_pooling)

    def find_match(self, sequence: Sequence) -> Match:
        """What the prefix cache has for a waiting sequence."""
        known = self.blocks.matches.get(sequence.request.id, len(sequence.tokens))
        return self.blocks.look_up(sequence, self.cacheable_keys(sequence)) if known is None else known

    def _block_being_computed(self, match: Match) -> tuple[int, bytes] | None:
        """The first block that a match lacks, if a running sequence computes it: its index and digest."""
        index = match.hits.usable
        if index >= len(match.keys):
            return None
        digest = match.keys[index].digest  # of all tokens up to there, so no other block of a sequence has it
        is_computed = any(
            each.remaining > 1
            and each.computed // BLOCK_SIZE <= index < len(each.keys)
            and each.keys[index].digest == digest
            for each in self._sequences.running
        )
        return (index, digest) if is_computed else None

    def _lacks_any(self, sequence: Sequence, blocks: list[tuple[int, bytes]]) -> bool:
        """Whether a sequence begins with the text up to one of these blocks, which the prefix cache lacks. Without a
        look-up, which takes time for each block before it.
        """
        if not blocks:
            return False
        known = min(len(sequence.keys), self._cacheable(sequence))
        return any(index < known and sequence.keys[index].digest == digest for index, digest in blocks)

    def _start(self, sequence: Sequence, keys: list[BlockKey], hits: Hits) -> None:
        self._sequences.start(sequence)
        self.blocks.matches.forget(sequence.request.id)
        self.blocks.start(sequence, keys, hits)
        sequence.computed = hits.usable * BLOCK_SIZE
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, len(sequence.request.prompt_ids))
            self._sequences.prompt_tokens += len(sequence.request.prompt_ids)
            self._sequences.cached_tokens += sequence.cached_tokens

    def _count(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """How many of a sequence's tokens this step computes: those without KV, within the budget; 0 if it only waits
        for its last token or for its grammar. A step scores at most `max_seqs` prompt tokens, because a result has room
        for no more.
        """
        if sequence.is_full(self._limits.context_length):
            return 0
        # Without a mask all its tokens are computed but the last one, whose logits choose the next token.
        count = min(sequence.remaining - (not sequence.may_sample), budget)
        if not sequence.scores_prompt:
            return count
        return min(count, self._limits.max_seqs - sum(len(chunk.scored) for chunk in chunks))

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        return Chunk(
            sequence,
            sequence.computed,
            count,
            samples=count == sequence.remaining and not sequence.request.embeds,
            sampling_row=sequence.sampling_row,
            scored=sequence.take_unscored(sequence.computed + count),
            completes=count == sequence.remaining and sequence.request.embeds,
        )

    def _make_room(self, sequence: Sequence, count: int) -> tuple[int, bool]:
        """Get blocks for the next `count` tokens, or for fewer. Preempts the least important sequences if necessary.

        Returns:
            For how many tokens there are blocks now, and whether any sequence was preempted.
        """
        if self.blocks.has_all(sequence, count):
            return count, False
        tenant, wanted, preempted = sequence.request.tenant, count, False
        while True:
            count = self.blocks.fitting(sequence, wanted)
            takes = self.blocks.missing(sequence, count)
            if takes.fit(self.blocks.room(tenant)):
                self.blocks.grow(sequence, count)
                return count, preempted
            # A tenant at its limit preempts its own requests only: the blocks of others would not help it.
            at_limit = self.blocks.is_at_limit(tenant, takes)
            candidates = [each for each in self._sequences.running if not at_limit or each.request.tenant == tenant]
            victim = max(candidates, key=lambda each: each.precedence)
            preempted = True
            self._preempt(victim)
            if victim is sequence:
                return 0, True

    def _preempt(self, sequence: Sequence) -> None:
        """Free the sequence's blocks and let it wait; its tokens are computed again when it runs the next time. It is
        never part of the current step already: more important sequences are scheduled first, and the victim is the
        least important one.
        """
        self.blocks.release(sequence)
        sequence.computed = 0
        self._sequences.preempt(sequence)

    def keys(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of all its full blocks; none without a prefix cache."""
        return sequence.known_keys(sequence.request.tenant) if self._limits.prefix_cache else []
