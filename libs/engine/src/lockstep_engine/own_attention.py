"""Replacement `forward`s for modules that bypass the attention function or cache more than needed.

They use the modules' own projections and norms.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from lockstep_engine.attention import StepAttention
from lockstep_engine.linear import HeadExpansion, HeadShard
from lockstep_engine.model_config import refuse
from lockstep_engine.scoring import Scoring


@dataclass
class CurrentStep:
    """The step that a model computes now, where its attention modules find it. There is one for each model."""

    attention: StepAttention | None = None
    window: Literal["module", "config"] | None = None
    """As in `Architecture`."""
    widest: Mapping[int, int] = field(default_factory=dict)
    """The largest window that a layer may have, by its number, because what lies before it is not kept; others may have
    any, or none."""
    calls: int = 0
    """Layers that have taken the step's attention."""

    def begin(self, attention: StepAttention) -> None:
        """Start a new step."""
        self.attention, self.calls = attention, 0

    def window_of(self, module: Any) -> int | None:
        """The window of an attention module that gives none to the attention function."""
        if self.window is None:
            return None
        window: int | None = getattr(module if self.window == "module" else module.config, "sliding_window", None)
        return window

    def take(self, layer: int, window: int | None = None) -> StepAttention:
        """The step's attention, for one more layer, which has this number and window."""
        assert self.attention is not None
        self.check_window(layer, window)
        self.calls += 1
        return self.attention

    def check_window(self, layer: int, window: int | None) -> None:
        """Check the window of a layer; None: it has none.

        Raises:
            LockstepError: INVALID_REQUEST: the layer would see blocks that are not kept.
        """
        widest = self.widest.get(layer)
        if widest is not None and (window is None or window > widest):
            raise refuse(f"a layer of the model sees {window or 'all'} last tokens; by config.json it is {widest}")


class KeyBias:
    """Attention with linear biases (Press et al. 2022): added to a head's scores, by the position of the key.

    A softmax does not change when the same number is added to all scores of a row. Therefore the query's position
    does not matter.

    Args:
        table: [heads, context length].
    """

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def on(self, device: torch.device) -> torch.Tensor:
        """The table, on `device`."""
        if self._table.device != device:
            self._table = self._table.to(device)
        return self._table


def interleaved_attention(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of BLOOM and Falcon: [1, tokens, hidden] → [1, tokens, hidden]. BLOOM's adds the residual, too."""
    qkv = self.query_key_value(hidden_states)[0]
    tokens, heads = qkv.shape[0], self.num_heads
    qkv = qkv.view(tokens, getattr(self, "num_kv_heads", heads), -1, self.head_dim)
    queries = qkv[:, :, :-2].reshape(tokens, heads, self.head_dim).transpose(0, 1)
    keys, values = qkv[:, :, -2].transpose(0, 1), qkv[:, :, -1].transpose(0, 1)
    bias = None
    if self.key_bias is None:
        assert position_embeddings is not None
        rotated = _code_of(self).apply_rotary_pos_emb(queries[None], keys[None], *position_embeddings)
        queries, keys = rotated[0][0], rotated[1][0]
    else:
        bias = self.key_bias.on(queries.device)
    scale = self.head_dim**-0.5
    out = self.current_step.take(self.layer_idx).attend(
        self.layer_idx, queries, keys, values, Scoring(scale, bias=bias)
    )
    projected: torch.Tensor = self.dense(out.reshape(1, tokens, -1))
    return projected if residual is None else projected + residual, None


def latent_attention(
    self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """DeepSeek's multi-head latent attention: one latent and one rotary key a token are cached, for all heads."""
    if self.q_lora_rank is None:
        queries = self.q_proj(hidden_states)
    else:
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    tokens = hidden_states.shape[1]
    plain, rotary = (
        queries.view(1, tokens, -1, self.qk_head_dim)
        .transpose(1, 2)
        .split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    )
    latent, key = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
    rotary, key = _rotate_interleaved(self, rotary, key.unsqueeze(1), position_embeddings)
    expansion: HeadExpansion = self.kv_b_proj
    latent_queries = torch.cat([expansion.absorb(plain[0]), rotary[0]], dim=-1)
    cached = torch.cat([self.kv_a_layernorm(latent), key[:, 0]], dim=-1)
    step = self.current_step.take(self.layer_idx)
    out = step.attend(self.layer_idx, latent_queries, cached, cached, Scoring(self.scaling))
    sums = expansion.expand(out[..., : self.kv_lora_rank].transpose(0, 1))
    projected: torch.Tensor = self.o_proj(sums.transpose(0, 1).reshape(1, tokens, -1))
    return projected, None


def _rotate_interleaved(
    module: Any, queries: torch.Tensor, keys: torch.Tensor, position_embeddings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate as the module's own code does; its versions differ."""
    code = _code_of(module)
    if isinstance(position_embeddings, torch.Tensor):  # complex numbers
        cosine, sine = position_embeddings.real.unsqueeze(1), position_embeddings.imag.unsqueeze(1)
        return _rotate_pairs(queries, cosine, sine), _rotate_pairs(keys, cosine, sine)
    elif getattr(module.config, "rope_interleave", False):
        rotated = code.apply_rotary_pos_emb_interleave(queries, keys, *position_embeddings)
    else:
        rotated = code.apply_rotary_pos_emb(queries, keys, *position_embeddings)
    return rotated[0], rotated[1]


def _rotate_pairs(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Multiply [1, heads, tokens, dim], whose adjacent components are the parts of complex numbers, by cosine + i sine
    [1, 1, tokens, dim / 2]. torch may round complex products in two ways.
    """
    pairs = x.float().view(*x.shape[:-1], -1, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], dim=-1)
    return rotated.flatten(-2).type_as(x)


_FORWARDS: dict[str, Callable[..., tuple[torch.Tensor, None]]] = {
    "interleaved": interleaved_attention,
    "latent": latent_attention,
}


def prepare_attention(
    model: nn.Module, step: CurrentStep, forward: str | None, heads: HeadShard, context_length: int, dtype: torch.dtype
) -> None:
    """Give each attention module the current step, and a replacement `forward` if one is named."""
    bias = _key_bias(model, heads, context_length, dtype) if forward == "interleaved" else None
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.current_step = step  # type: ignore[assignment]
            if forward is not None and hasattr(module, "head_dim" if forward == "interleaved" else "kv_b_proj"):
                module.key_bias = bias  # type: ignore[assignment]
                module.forward = MethodType(_FORWARDS[forward], module)


def _key_bias(model: Any, heads: HeadShard, context_length: int, dtype: torch.dtype) -> KeyBias | None:
    """The biases of this rank's heads, rounded as the model's own code rounds them."""
    config = model.config
    if not getattr(config, "alibi", True):  # BLOOM has no such setting
        return None
    every = torch.ones(1, context_length, dtype=torch.long)
    table = _code_of(model).build_alibi_tensor(every, heads.total, dtype).view(heads.total, context_length)
    if config.model_type == "falcon":
        table = table / (config.hidden_size // heads.total) ** 0.5
    return KeyBias(table.narrow(0, heads.first, heads.count).float().contiguous())


def _code_of(module: nn.Module) -> Any:
    """The Python module that a model's class is written in."""
    return sys.modules[type(module).__module__]
