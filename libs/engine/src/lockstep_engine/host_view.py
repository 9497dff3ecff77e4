"""The driver's view of the prefix cache's second tier in host memory: the bytes of slots, for each rank.

A block consists of parts: the units of the ranks' slots (see `HostSizes`), each for other heads. They are what a store
outside of the machine has, and the same whatever the number of ranks is. With fewer heads than ranks, several ranks
have the same part: it is read from the first of them, and written to all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep_engine.blocks import HostSizes
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.control import Ready
from lockstep_engine.remote_store import BlockForm, HeadRange


@dataclass(frozen=True)
class HostView:
    """The memory of all ranks in one epoch."""

    memories: tuple[memoryview, ...]
    """The slots of each rank."""
    heads: tuple[HeadRange, ...]
    """Of each part."""
    places: tuple[tuple[tuple[int, int], ...], ...]
    """Of each part: the ranks that have it, and which one of their units it is."""
    forms: tuple[BlockForm, BlockForm]
    """Of a part of a hot block, and of a cold one."""
    slot_bytes: int

    @classmethod
    def of(
        cls,
        ranks: Sequence[Ready],
        sizes: HostSizes,
        memories: Sequence[memoryview],
        *,
        hot_layers: int = 0,
        copies: bool = False,
    ) -> "HostView":
        """The view of ranks that have said what their KV cache is like. `hot_layers`: how many layers have no cold
        blocks; `copies`: those of the others have the bits of the hot ones.
        """
        first, units = ranks[0], sizes.units
        width = first.kv_heads // units
        hot, cold = (
            (1 if first.latent else 2, layers, width, BLOCK_SIZE, first.head_dim)
            for layers in (first.layers, first.layers - hot_layers)
        )
        hot_bytes = sizes.hot_bytes or sizes.hot_slots * sizes.slot_bytes
        places: dict[HeadRange, list[tuple[int, int]]] = {}
        for rank, each in enumerate(ranks):
            for unit in range(units):
                places.setdefault(HeadRange(each.first_kv_head + unit * width, width), []).append((rank, unit))
        return cls(
            tuple(memories),
            tuple(places),
            tuple(map(tuple, places.values())),
            (
                BlockForm(first.dtype, hot, hot_bytes // units),
                BlockForm(first.dtype if copies else f"{first.dtype}_e4m3", cold, sizes.slot_bytes // units),
            ),
            sizes.slot_bytes,
        )

    def part(self, part: int, slots: tuple[int, ...], *, cold: bool) -> memoryview | None:
        """The memory of a part, of the first rank that has it, if it is in one piece."""
        if slots != tuple(range(slots[0], slots[0] + len(slots))):
            return None
        rank, unit = self.places[part][0]
        length = self.forms[cold].length
        begin = slots[0] * self.slot_bytes + unit * length
        return self.memories[rank][begin : begin + length]

    def read(self, part: int, slots: tuple[int, ...], *, cold: bool) -> memoryview:
        """A part's contents: its memory, or a copy."""
        memory = self.part(part, slots, cold=cold)
        if memory is not None:
            return memory
        return memoryview(b"".join(self._pieces(self.places[part][0], slots, self.forms[cold].length)))

    def write(self, part: int, slots: tuple[int, ...], content: memoryview) -> None:
        """Fill a part's memory, of all ranks that have it."""
        for place in self.places[part]:
            begin = 0
            for piece in self._pieces(place, slots, len(content)):
                piece[:] = content[begin : begin + len(piece)]
                begin += len(piece)

    def _pieces(self, place: tuple[int, int], slots: tuple[int, ...], length: int) -> Iterator[memoryview]:
        """The memory of a unit of a rank's block, slot by slot."""
        (rank, unit), size = place, self.slot_bytes
        begin, end = unit * length, (unit + 1) * length
        while begin < end:
            index, offset = divmod(begin, size)
            count = min(end - begin, size - offset)
            start = slots[index] * size + offset
            yield self.memories[rank][start : start + count]
            begin += count
