"""Lockstep's engine: tensor-parallel generation with paged KV, usable without any service.

`Engine` takes and gives text; `AsyncEngine` takes and gives token ids inside an asyncio loop. Importing this package
does not import torch: that happens in the rank processes alone.
"""

from lockstep_engine.config import EngineConfig
from lockstep_engine.embedding_config import EmbeddingInfo
from lockstep_engine.engine import AsyncEngine
from lockstep_engine.engine_status import EngineState, EngineStatus, RankStatus
from lockstep_engine.host_tier import HostUsage
from lockstep_engine.mailbox import RankTimes
from lockstep_engine.model_config import ModelInfo
from lockstep_engine.offline import Engine
from lockstep_engine.prefix_log import PrefixChanges
from lockstep_engine.remote_store import BlockForm, FetchResult, HeadRange, RemoteStore, StoredBlock
from lockstep_engine.remote_tier import RemoteUsage
from lockstep_engine.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    Logprobs,
    Output,
    Phase,
    PhaseChange,
    PromptLogprobs,
    PromptScores,
    Request,
    SamplingParams,
    TokenLogprob,
)

__all__ = [
    "AsyncEngine",
    "BlockForm",
    "EmbeddingInfo",
    "Engine",
    "EngineConfig",
    "EngineState",
    "EngineStatus",
    "FetchResult",
    "FinishReason",
    "Grammar",
    "GrammarKind",
    "HeadRange",
    "HostUsage",
    "Logprobs",
    "ModelInfo",
    "Output",
    "Phase",
    "PhaseChange",
    "PrefixChanges",
    "PromptLogprobs",
    "PromptScores",
    "RankStatus",
    "RankTimes",
    "RemoteStore",
    "RemoteUsage",
    "Request",
    "SamplingParams",
    "StoredBlock",
    "TokenLogprob",
]
