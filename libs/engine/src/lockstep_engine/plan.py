"""What the driver tells the ranks in a step and what they answer: plain messages, encoded with msgpack into shared
memory.

The control messages around a rank's start are here, too.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep_engine.config import HotWindow

Int32Array = NDArray[np.int32]


LAST_SAMPLED = -1
"""In place of a token's id: the one that was last sampled for its sequence's slot."""


class SlotSampling(msgspec.Struct, array_like=True):
    """Sampling of the request that occupies a slot, with what the penalties need of its past."""

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    logprobs: int  # -1: none
    prompt_ids: list[int]  # empty unless a penalty is set
    emitted_ids: list[int]  # likewise
    forbidden_ids: list[int]  # cannot be chosen while the output is shorter than min_tokens
    min_tokens: int


class PoolSizes(msgspec.Struct, array_like=True, frozen=True):
    """Blocks of each pool of the KV cache."""

    hot: int
    cold: int = 0


class Plan(msgspec.Struct, array_like=True):
    """One step. Arrays are int32, one entry for each scheduled sequence unless said otherwise."""

    step: int
    token_ids: bytes  # of all sequences one after the other: [tokens], at most the last of each LAST_SAMPLED
    starts: bytes  # position of the first token
    lengths: bytes  # tokens computed in this step
    slots: bytes
    samples: bytes  # 1: the last token's logits choose the next token
    emitted: bytes  # output tokens so far, those in flight included
    uniforms: bytes  # float64, for the sequences that sample
    tables: bytes  # ids of blocks as each sequence's last query sees them (see `kv_cache`), [sequences, table_width]
    table_width: int
    added: list[SlotSampling]  # slots that have a new occupant
    targets: bytes = b""  # the id that follows each token if its log probability is wanted, else -1; empty: none is
    whole: bool = False  # for the targets, the log probabilities of the whole vocabulary are wanted, too
    hot_tables: bytes = b""  # ids of hot blocks, [sequences, table_width]; empty: no block is seen both hot and cold
    moves: bytes = b""  # [n, 2]: hot blocks, and cold ones to be made of them in each layer before it attends
    late_moves: bytes = b""  # the same, after the step


class StepLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities for one sampled token."""

    chosen: float
    top_ids: list[int]
    top_logprobs: list[float]


class Result(msgspec.Struct, array_like=True):
    """Rank 0's answer: one entry for each sequence that samples, in the plan's order."""

    step: int
    token_ids: list[int]
    logprobs: list[StepLogprobs | None]
    waited_us: int  # before the step rank 0 had nothing to compute for so long
    collective_us: int
    unserved: list[int] = []  # slots whose new occupants there is no memory for; what they sample means nothing
    target_logprobs: bytes = b""  # float32, one for each target >= 0 of the plan
    target_ranks: bytes = b""  # int32, likewise: 1 for the most likely token
    distributions: bytes = b""  # float32, [targets, vocabulary] when the plan asks for the whole


class RankSpec(msgspec.Struct):
    """Everything a rank is told at its start."""

    rank: int
    tp: int
    label: str
    epoch: int
    model: str
    device: str
    dtype: str
    max_seqs: int
    max_batch_tokens: int
    context_length: int
    kv_memory_bytes: int | None
    deterministic: bool | None
    threads: int
    hidden_size: int
    vocab_size: int
    start_timeout_s: float
    hot_window: HotWindow | None = None
    compressed_layers: list[int] | None = None
    """Layers whose cold blocks are compressed; None: all."""
    collectives: str = "auto"
    cuda_graphs: bool = True


class Loading(msgspec.Struct, tag=True):
    """A rank has read so many bytes of its weights."""

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


class StartFailed(msgspec.Struct, tag=True):
    """A rank cannot start, or not go on; trying again cannot help when `permanent`."""

    message: str
    permanent: bool


ControlMessage = Loading | Loaded | AllocateBlocks | Ready | StartFailed

encode_plan = msgspec.msgpack.Encoder().encode
decode_plan = msgspec.msgpack.Decoder(Plan).decode
encode_result = msgspec.msgpack.Encoder().encode
decode_result = msgspec.msgpack.Decoder(Result).decode
encode_control = msgspec.msgpack.Encoder().encode
decode_control = msgspec.msgpack.Decoder(ControlMessage).decode
