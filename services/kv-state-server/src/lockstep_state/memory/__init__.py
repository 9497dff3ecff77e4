"""The backend in this process's memory: bounded, accounted in bytes, and gone with the process."""

from lockstep_state.memory.memory import MemoryBackend

__all__ = ["MemoryBackend"]
