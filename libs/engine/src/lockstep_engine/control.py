"""The control channels between driver, zygote and ranks: messages of a rank's start and end, and doorbells.

They are sent over `SOCK_SEQPACKET` sockets, one message a packet. This module owns the layout of every packet and of
the file descriptors sent along. Plans and results go through shared memory; their layout is owned by `plan`.
"""

import os
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import EngineConfig, HotWindow
from lockstep_engine.model_config import ModelInfo

MAX_CONTROL_BYTES = 64 * 1024
"""Most bytes of one message."""
MAX_PROFILE_BYTES = 16 << 20
"""Most bytes of a rank's profile, compressed."""

ZYGOTE_READY = b"ready"
"""The zygote's first packet: it has imported what ranks need. Its later packets are messages."""

_DOORBELL = struct.Struct("<Q")


class RankSpec(msgspec.Struct, frozen=True):
    """Everything a rank needs at its start. The driver has read the checkpoint's configuration; a rank does not."""

    rank: int
    epoch: int
    config: EngineConfig
    model: ModelInfo
    threads: int
    """CPU threads of this rank."""
    log_level: str = "info"

    @property
    def hot_window(self) -> HotWindow | None:
        """Which blocks sequences keep hot; None: all."""
        return self.config.hot_window_with(self.model.windowed)

    @property
    def compressed(self) -> HotWindow | None:
        """Which blocks queries see compressed; None: no block."""
        return self.config.compressed_with(self.model.windowed)


class Loading(msgspec.Struct, tag=True):
    """Progress of a rank that reads its weights."""

    done_bytes: int
    total_bytes: int


class Loaded(msgspec.Struct, tag=True):
    """A rank has its weights and knows how many blocks of KV cache it can hold."""

    blocks: PoolSizes
    phases_s: dict[str, float]


class AllocateBlocks(msgspec.Struct, tag=True):
    """The driver's answer: as many blocks as all ranks can hold."""

    blocks: PoolSizes


class Ready(msgspec.Struct, tag=True):
    """A rank waits for its first plan."""

    deterministic: bool
    device: str
    dtype: str
    fingerprint: str = ""
    """Fingerprint of the rank's numerics (see `canary`): the same on every rank of a deterministic group; empty:
    unknown."""
    step_s: float = 0.0
    """How long a step took in the self-test, without `token_s` for each of its tokens; both 0: unknown."""
    token_s: float = 0.0
    layers: int = 0
    """`layers` and the next three: the shape of its KV cache; 0: unknown."""
    first_kv_head: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    """As in `KvCache`."""
    phases_s: dict[str, float] = {}
    """Seconds of all phases of the start, those of `Loaded` too."""
    loaded_at_s: float = 0.0
    """On the rank's monotonic clock: when it sent `Loaded`, and when `AllocateBlocks` had come; both 0: unknown."""
    allocated_at_s: float = 0.0


class StartFailed(msgspec.Struct, tag=True):
    """A rank cannot start, or cannot go on. If `permanent`, another start would fail in the same way."""

    message: str
    permanent: bool


class RankLogEntry(msgspec.Struct, tag=True):
    """A record of a rank's log, for the driver to write."""

    level: int
    """As in `logging`."""
    logger: str
    message: str
    step: int
    """Steps that the rank had finished."""
    exception: str
    """Type and places, without what the exception says; empty: there is none."""
    fields: dict[str, str | int | float | bool | None]
    dropped: int
    """Records before this one that there was no room for."""


class SetLogLevel(msgspec.Struct, tag=True):
    """The driver's order to log from another level on. A rank obeys between two steps."""

    level: str


class StartProfile(msgspec.Struct, tag=True):
    """The driver's order to profile steps. All ranks read it between the same two steps."""

    number: int
    """Of the profile."""
    steps: int
    """How many; the rank may stop earlier."""


class StopProfile(msgspec.Struct, tag=True):
    """The driver's order to give what there is of a profile, or to forget it."""

    number: int


class ProfileEnded(msgspec.Struct, tag=True):
    """A rank's profile, whose file is sent along, or why there is none."""

    number: int
    error: str


class Fork(msgspec.Struct, tag=True):
    """To the zygote: start a rank. `RankDescriptors` are sent along."""

    spec: RankSpec
    shared_collectives: bool
    shared_host: bool = False
    flight_record: bool = False
    """Whether the rank writes its flight record when it is asked for it."""


class RankDescriptors(NamedTuple):
    """File descriptors that are sent along with `Fork`, in this order."""

    control: int
    """The rank's end of its socket to the driver."""
    mailbox: int
    collectives: int
    """Shared segment of collectives; not used unless `Fork.shared_collectives`."""
    rendezvous: int
    """File through which the ranks meet if they use torch.distributed."""
    stderr: int
    """The rank's standard error: a pipe to the driver."""
    stacks: int
    """File to which the rank writes its stacks on SIGUSR1."""
    flight: int
    """File to which the rank writes its flight record; not used unless `Fork.flight_record`."""
    host: int
    """Shared segment of the rank's tier in host memory; not used unless `Fork.shared_host`."""

    def close(self) -> None:
        """Close all of them."""
        for descriptor in self:
            os.close(descriptor)


class Forked(msgspec.Struct, tag=True):
    """From the zygote: a rank has started."""

    rank: int
    pid: int


class KillAll(msgspec.Struct, tag=True):
    """To the zygote: SIGKILL every rank and wait until each has ended."""


class Killed(msgspec.Struct, tag=True):
    """From the zygote: the wait status of each rank, by rank."""

    statuses: dict[int, int]


RankMessage = (
    Loading
    | Loaded
    | AllocateBlocks
    | Ready
    | StartFailed
    | RankLogEntry
    | SetLogLevel
    | StartProfile
    | StopProfile
    | ProfileEnded
)
ZygoteMessage = Fork | Forked | KillAll | Killed


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _decode_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be received")


encode_control = msgspec.msgpack.Encoder(enc_hook=_encode_path).encode
decode_rank_message = msgspec.msgpack.Decoder(RankMessage).decode
decode_zygote_message = msgspec.msgpack.Decoder(ZygoteMessage, dec_hook=_decode_path).decode


def send_fork(zygote: socket.socket, message: Fork, descriptors: RankDescriptors) -> None:
    """Driver: send the order to start a rank. The descriptors stay open here."""
    socket.send_fds(zygote, [encode_control(message)], list(descriptors))


def receive_order(driver: socket.socket) -> tuple[Fork, RankDescriptors] | KillAll | None:
    """Zygote: wait for an order of the driver. The descriptors are the caller's to close. None: the driver is gone."""
    data, descriptors, _, _ = socket.recv_fds(driver, MAX_CONTROL_BYTES, len(RankDescriptors._fields))
    if not data:
        return None
    message = decode_zygote_message(data)
    if isinstance(message, Fork):
        return message, RankDescriptors(*descriptors)
    assert isinstance(message, KillAll)
    return message


def encode_doorbell(step: int) -> bytes:
    """The packet that says: the plan (or the result) of `step` is in the mailbox."""
    return _DOORBELL.pack(step)


def decode_doorbell(packet: bytes) -> int | None:
    """The step whose doorbell `packet` is; None if it is a message. Every message is shorter or longer."""
    return _DOORBELL.unpack(packet)[0] if len(packet) == _DOORBELL.size else None
