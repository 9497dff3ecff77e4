"""Generated checkpoints for measurements: random weights in the shapes of known models, and a model that copies.

Random weights are as fast as trained ones; they say nothing about accuracy.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "models/reference/tokenizer.json"


@dataclass(frozen=True)
class Shape:
    """A Llama's dimensions."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int = 4096

    @property
    def parameters(self) -> int:
        """Weights, with tied embeddings; norms left out."""
        head = self.hidden // self.heads
        layer = self.hidden * (2 * self.heads + 2 * self.kv_heads) * head + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocab * self.hidden

    def config(self) -> LlamaConfig:
        """The configuration in `transformers`' form."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        )


SHAPES = {
    "1b": Shape(2048, 8192, 16, 32, 8, 128256),  # Llama-3.2-1B
    "0.5b": Shape(1536, 4096, 18, 24, 8, 32000),  # between Qwen2-0.5B and TinyLlama-1.1B
    "qwen-0.5b": Shape(896, 4864, 24, 14, 2, 151936),  # Qwen2.5-0.5B without its biases: a quarter of it is vocabulary
    "0.1b": Shape(768, 2048, 12, 12, 4, 4096),  # the vocabulary of the reference model's tokenizer
    "tiny": Shape(64, 96, 2, 4, 2, 300, 512),
}


def write_random(shape: Shape, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A checkpoint of random weights; the same shape gives the same."""
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = LlamaForCausalLM(shape.config())
    finally:
        torch.set_default_dtype(previous)
    model.save_pretrained(folder)
    shutil.copy(TOKENIZER, folder)
    return folder


_TOKEN = 48  # dimensions that encode a token
_BACK = 3  # tokens that must be the same
_HEAD = 256
_HIDDEN = (_BACK + 3) * _TOKEN
_POSITION_SHARPNESS = 500.0
_MATCH_SHARPNESS = 12.0 * 16
_ANSWER_SHARPNESS = 20.0
_THETA = 1e10
"""Base of the rotary angles: so large that the slower half of them is nearly constant within the context."""


def write_copier(folder: Path, context: int = 8192) -> Path:
    """A two-layer Llama that continues as its last three tokens were continued before: induction heads made by hand.

    The hidden state has six parts: the token, a constant, the three tokens before it, and the answer. The first layer's
    heads attend one, two and three positions back (a sharp sum of cosines of the distance) and store the tokens there;
    the second layer's head attends to the position that the same three tokens precede, in dimensions that rotary angles
    hardly change, and takes that position's token as the answer. It recalls at any distance without training, so a
    token that it does not recall is an error of the cache.
    """
    vocab = 4096  # the reference model's tokenizer
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=_HEAD,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
    )
    model = LlamaForCausalLM(config)
    token, constant, answer, *before = (slice(n * _TOKEN, (n + 1) * _TOKEN) for n in range(_BACK + 3))
    names = torch.randn(vocab, _TOKEN, generator=torch.Generator().manual_seed(0))
    names /= names.norm(dim=1, keepdim=True)
    half = _HEAD // 2
    slow = torch.cat([torch.arange(_HEAD - _TOKEN * 3 // 2, _HEAD), torch.arange(half - _TOKEN * 3 // 2, half)])
    angles = _THETA ** (-torch.arange(half) / half)
    unit = torch.eye(_TOKEN)
    layers = model.model.layers
    first, second = (layer.self_attn for layer in layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # Norms make the mean square 1; these take it back to parts of length 1, of which there are so many.
        for norm, parts in ((layers[0].input_layernorm, 2), (layers[1].input_layernorm, 5), (model.model.norm, 6)):
            norm.weight.fill_((parts / _HIDDEN) ** 0.5)
        model.model.embed_tokens.weight[:, token] = names
        model.model.embed_tokens.weight[:, constant.start] = 1
        model.lm_head.weight[:, answer] = names * _ANSWER_SHARPNESS
        for back, place in enumerate(before, start=1):
            rows = slice((back - 1) * _HEAD, back * _HEAD)
            direction = torch.cat([torch.cos(back * angles), -torch.sin(back * angles)])
            first.q_proj.weight[rows, constant.start] = direction * _POSITION_SHARPNESS
            first.k_proj.weight[rows, constant.start] = torch.cat([torch.ones(half), torch.zeros(half)])
            first.v_proj.weight[rows, token][:_TOKEN] = unit
            first.o_proj.weight[place, rows][:, :_TOKEN] = unit
        for rows, present, past in zip(slow.split(_TOKEN), (token, *before[:-1]), before, strict=True):
            second.q_proj.weight[rows, present] = unit * _MATCH_SHARPNESS
            second.k_proj.weight[rows, past] = unit
        second.v_proj.weight[:_TOKEN, token] = unit
        second.o_proj.weight[answer, :_TOKEN] = unit
    model.save_pretrained(folder)
    shutil.copy(TOKENIZER, folder)
    return folder
