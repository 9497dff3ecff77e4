"""The driver's view of the prefix cache's second tier in host memory: the bytes of slots, for each rank."""

from collections.abc import Sequence
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
    forms: tuple[BlockForm, BlockForm]
    """Of an uncompressed block, and of a compressed one."""
    slot_bytes: int

    @classmethod
    def of(cls, ranks: Sequence[Ready], sizes: HostSizes, memories: Sequence[memoryview]) -> "HostView":
        """The view of ranks that have said what their KV cache is like."""
        first = ranks[0]
        shape = (2, first.layers, first.kv_heads, BLOCK_SIZE, first.head_dim)
        hot_bytes = sizes.hot_bytes or sizes.hot_slots * sizes.slot_bytes
        return cls(
            tuple(memories),
            tuple(HeadRange(each.first_kv_head, each.kv_heads) for each in ranks),
            (BlockForm(first.dtype, shape, hot_bytes), BlockForm(f"{first.dtype}_e4m3", shape, sizes.slot_bytes)),
            sizes.slot_bytes,
        )

    def part(self, rank: int, slots: tuple[int, ...], *, cold: bool) -> memoryview | None:
        """The memory of a block if its slots follow each other."""
        if slots != tuple(range(slots[0], slots[0] + len(slots))):
            return None
        begin = slots[0] * self.slot_bytes
        return self.memories[rank][begin : begin + self.forms[cold].length]

    def read(self, rank: int, slots: tuple[int, ...], *, cold: bool) -> memoryview:
        """A block's contents: its memory, or a copy."""
        part, size = self.part(rank, slots, cold=cold), self.slot_bytes
        if part is not None:
            return part
        pieces = (self.memories[rank][slot * size : (slot + 1) * size] for slot in slots)
        return memoryview(b"".join(pieces))[: self.forms[cold].length]

    def write(self, rank: int, slots: tuple[int, ...], content: memoryview) -> None:
        """Fill a block's slots."""
        for index, slot in enumerate(slots):
            piece = content[index * self.slot_bytes : (index + 1) * self.slot_bytes]
            self.memories[rank][slot * self.slot_bytes : slot * self.slot_bytes + len(piece)] = piece
