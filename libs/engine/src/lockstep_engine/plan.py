"""What the driver tells the ranks in a step and what they answer: plain messages, encoded with msgpack into shared
memory.

The control messages around a rank's start are here, too.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


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


class Plan(msgspec.Struct, array_like=True):
    """One step. Arrays are int32, one entry for each scheduled sequence unless said otherwise."""

    step: int
    token_ids: bytes  # of all sequences one after the other: [tokens]
    starts: bytes  # position of the first token
    lengths: bytes  # tokens computed in this step
    slots: bytes
    samples: bytes  # 1: the last token's logits choose the next token
    emitted: bytes  # output tokens so far
    uniforms: bytes  # float64, for the sequences that sample
    tables: bytes  # block numbers, [sequences, table_width], -1 where unused
    table_width: int
    added: list[SlotSampling]  # slots that have a new occupant


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
    forward_us: int
    collective_us: int


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


class Loading(msgspec.Struct, tag=True):
    """A rank has read so many bytes of its weights."""

    done_bytes: int
    total_bytes: int


class Loaded(msgspec.Struct, tag=True):
    """A rank has its weights and knows how many blocks of KV cache it can hold."""

    blocks: int
    phases_s: dict[str, float]


class AllocateBlocks(msgspec.Struct, tag=True):
    """The driver's answer: the number of blocks all ranks can hold."""

    blocks: int


class Ready(msgspec.Struct, tag=True):
    """A rank waits for its first plan."""

    deterministic: bool
    device: str
    dtype: str


class StartFailed(msgspec.Struct, tag=True):
    """A rank cannot start; trying again cannot help when `permanent`."""

    message: str
    permanent: bool


ControlMessage = Loading | Loaded | AllocateBlocks | Ready | StartFailed

encode_plan = msgspec.msgpack.Encoder().encode
decode_plan = msgspec.msgpack.Decoder(Plan).decode
encode_result = msgspec.msgpack.Encoder().encode
decode_result = msgspec.msgpack.Decoder(Result).decode
encode_control = msgspec.msgpack.Encoder().encode
decode_control = msgspec.msgpack.Decoder(ControlMessage).decode
