"""A model computed by `transformers` with the weights of one decoder layer in memory at a time.

The model stands on the meta device, without weights. What is outside of the decoder layers is loaded at the start; a
layer is loaded when the computation reaches it, from the checkpoint chosen for it, and dropped after it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lockstep_engine.linear import Piece
from lockstep_engine.model_config import ModelInfo, refuse
from lockstep_engine.weights import Checkpoint, distinct_parameters, fill, pieces_of
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Modules that choose experts: small, and a wrong choice costs more than a rounded weight."""
_ROWS_AT_ONCE = 256

Visit = Callable[[int, nn.Module, Callable[..., Any]], Any]
"""Given a layer's number, the layer with its weights, and its computation; returns what the computation returns. The
computation takes the number of windows, the first ones; without it all are computed."""


@dataclass(frozen=True)
class Unit:
    """A matrix that can be quantized, or another parameter."""

    stored: str
    """Name in the checkpoint."""
    parameter: str
    """Name in the model."""
    value: torch.Tensor
    """[out, in] or [size], a view of the parameter."""
    inputs: tuple[int, int]
    """Which inputs it has: the address of the parameter, and its expert (-1: it has none)."""

    @property
    def module(self) -> str:
        """The module's name in the checkpoint."""
        return self.stored.removesuffix(".weight")


class LayeredModel:
    """Args:
    info: the checkpoint, in float.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.checkpoint = Checkpoint(info)
        config = AutoConfig.from_pretrained(info.path, local_files_only=True, trust_remote_code=False)
        config._experts_implementation = "eager"  # it multiplies by one expert at a time
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        self.model.eval().requires_grad_(requires_grad=False)
        count = int(self.model.config.get_text_config().num_hidden_layers)
        found = [
            (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count and name.count(".") <= 2
        ]
        if not found:
            raise refuse(f"model {info.path}: {info.architecture} has no list of decoder layers")
        self.prefix, layers = found[0]
        self.layers = list(layers)
        head = self.model.get_output_embeddings()
        self._head = next(name for name, module in self.model.named_modules() if module is head)
        self._load_outside()

    def _load_outside(self) -> None:
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        outside = [module for module in self.model.modules() if id(module) not in inside]
        buffers = [module for module in outside if module._non_persistent_buffers_set]
        for module in outside:
            module.to_empty(device="cpu", recurse=False)
        for module in buffers:
            self.model._init_weights(module)
        if getattr(self.model.config, "tie_word_embeddings", False) and not self._has_own_head():
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight
        known = {id(module) for module in outside}
        for module, name, parameter in distinct_parameters(self.model):
            if id(module) in known:
                fill(self.checkpoint, self._pieces(self.checkpoint, module, name, parameter), parameter)

    def _has_own_head(self) -> bool:
        """Whether the checkpoint has a head that differs from the embedding. The engine then uses that one."""
        embedding = self.model.get_input_embeddings()
        table = next(name for name, module in self.model.named_modules() if module is embedding)
        if self.checkpoint.find(f"{self._head}.weight") is None:
            return False
        rows = len(embedding.weight)
        ours, theirs = (Piece(f"{name}.weight", 0, 0, rows, 0, full_size=rows) for name in (self._head, table))
        return not self.checkpoint.equal(ours, theirs, list(embedding.weight.shape))

    def head(self) -> Unit:
        """The output head. A tied one has the embedding's values, and the name of a head of its own."""
        name, weight = f"{self._head}.weight", self.model.get_output_embeddings().weight
        return Unit(self.checkpoint.find(name) or name, name, weight.data, (id(weight), -1))

    @contextmanager
    def _with_head(self, source: Checkpoint | None) -> Iterator[None]:
        """Use another checkpoint's head meanwhile; None: this model's own."""
        head = self.model.get_output_embeddings()
        own = head.weight
        if source is not None:
            head.weight = nn.Parameter(torch.empty_like(own), requires_grad=False)
            fill(source, self._pieces(source, head, f"{self._head}.weight", head.weight), head.weight)
        try:
            yield
        finally:
            head.weight = own

    @staticmethod
    def _pieces(checkpoint: Checkpoint, module: nn.Module, name: str, parameter: torch.Tensor) -> list[Piece]:
        return pieces_of(module, name, parameter, checkpoint)

    @contextmanager
    def loaded(self, number: int, source: Checkpoint | None = None) -> Iterator[nn.Module]:
        """A layer with its weights, from this checkpoint or another one of the same model."""
        layer, checkpoint = self.layers[number], source or self.checkpoint
        layer.to_empty(device="cpu")
        for module in layer.modules():
            if module._non_persistent_buffers_set:
                self.model._init_weights(module)
        for module, name, parameter in self._parameters(number):
            fill(checkpoint, self._pieces(checkpoint, module, name, parameter), parameter)
        try:
            yield layer
        finally:
            layer.to("meta")

    def _parameters(self, number: int) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        for module, name, parameter in distinct_parameters(self.layers[number]):
            yield module, f"{self.prefix}.{number}.{name.lstrip('.')}", parameter

    def units(self, number: int) -> list[Unit]:
        """The matrices of a layer, which is loaded or not: linears, and experts that are stored one by one."""
        units = []
        for module, name, parameter in self._parameters(number):
            is_linear = (
                isinstance(module, Conv1D) or type(module) is nn.Linear or type(module).__name__ == "FalconLinear"
            )
            stacked = parameter.dim() == 3
            if not ((is_linear and name.endswith(".weight")) or stacked) or is_router(name):
                continue
            for piece in self._pieces(self.checkpoint, module, name, parameter):
                stored = self.checkpoint.find(piece.source)
                if stored is None or (stacked and piece.index is None):
                    continue
                value = parameter.data if piece.index is None else parameter.data[piece.index]
                value = value.narrow(piece.dim, piece.offset, piece.length)
                expert = -1 if piece.index is None else piece.index
                value = value.t() if isinstance(module, Conv1D) else value
                units.append(Unit(stored, name, value, (id(parameter), expert)))
        return units

    def plain(self, number: int) -> dict[str, Unit]:
        """The other parameters of a layer, by name, if each has a tensor of its own: norms, biases, routers."""
        matrices, found = {unit.inputs[0] for unit in self.units(number)}, {}
        for module, name, parameter in self._parameters(number):
            pieces = self._pieces(self.checkpoint, module, name, parameter)
            stored = self.checkpoint.find(pieces[0].source) if len(pieces) == 1 else None
            if stored is not None and id(parameter) not in matrices:
                found[name] = Unit(stored, name, parameter.data, (id(parameter), -1))
        return found

    @torch.inference_mode()
    def states(
        self, ids: torch.Tensor, visit: Visit | None = None, sources: Sequence[Checkpoint | None] = ()
    ) -> torch.Tensor:
        """Hidden states of windows of tokens, [windows, tokens] → [windows, tokens, width].

        Args:
            ids: the windows.
            visit: called for each layer.
            sources: for each layer the checkpoint of its weights (None: this model's own).
        """
        states: torch.Tensor = self._run(ids, visit, sources)[0]
        return states

    def _run(self, ids: torch.Tensor, visit: Visit | None, sources: Sequence[Checkpoint | None]) -> Any:
        originals = [layer.forward for layer in self.layers]
        for number, (layer, forward) in enumerate(zip(self.layers, originals, strict=True)):
            source = sources[number] if sources else None
            layer.forward = self._forward(number, forward, len(ids), visit, source)
        try:
            return self.model.base_model(input_ids=ids, use_cache=False)
        finally:
            for layer, forward in zip(self.layers, originals, strict=True):
                layer.forward = forward

    def _forward(
        self, number: int, forward: Callable[..., Any], windows: int, visit: Visit | None, source: Checkpoint | None
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            def compute(count: int = windows) -> Any:
                parts = []
                for window in range(count):
                    own = [_part(each, window, windows) for each in args]
                    named = {name: _part(each, window, windows) for name, each in kwargs.items()}
                    parts.append(forward(*own, **named))
                if isinstance(parts[0], tuple):
                    return (torch.cat([part[0] for part in parts]), *parts[0][1:])
                return torch.cat(parts)

            with self.loaded(number, source) as layer:
                return compute() if visit is None else visit(number, layer, compute)

        return run

    @torch.inference_mode()
    def perplexity(
        self, ids: torch.Tensor, sources: Sequence[Checkpoint | None] = (), head: Checkpoint | None = None
    ) -> float:
        """Perplexity of windows [windows, tokens], of which each predicts its own tokens from the second on.

        Args:
            ids: the windows.
            sources: for each layer the checkpoint of its weights (None: this model's own).
            head: the checkpoint of the output head, of which it has a tensor (None: this model's own).
        """
        out, nats, count = self._run(ids, None, sources), 0.0, 0
        with self._with_head(head):
            for window, row in zip(ids, out[0], strict=True):
                for first in range(0, len(window) - 1, _ROWS_AT_ONCE):
                    part = slice(first, min(first + _ROWS_AT_ONCE, len(window) - 1))
                    logits = self._logits(out, window[part], row[part])
                    targets = window[part.start + 1 : part.stop + 1]
                    nats += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
                    count += len(targets)
        return math.exp(nats / count)

    def _logits(self, out: Any, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The logits of some tokens [tokens, vocabulary], by the model's own code: many scale or cap them.

        Args:
            out: what the layers gave for all tokens.
            ids: the tokens.
            states: their hidden states.
        """
        inner, part = self.model.base_model, replace(out, last_hidden_state=states[None])
        original, inner.forward = inner.forward, lambda *_args, **_kwargs: part
        try:
            logits: torch.Tensor = self.model(input_ids=ids[None], use_cache=False).logits[0]
            return logits
        finally:
            inner.forward = original


def is_router(parameter: str) -> bool:
    """Whether a parameter chooses experts, by its name in the model."""
    return bool(_ROUTERS & set(parameter.split(".")[-3:-1]))


def _part(value: Any, number: int, windows: int) -> Any:
    """What of a layer's argument belongs to one of the windows that are computed together."""
    if isinstance(value, tuple):
        return tuple(_part(each, number, windows) for each in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[0] % windows:
        return value
    each = value.shape[0] // windows
    return value[number * each : (number + 1) * each]


class InputProducts(TorchFunctionMode):
    """While it is active, adds up x xᵀ and |x| over the inputs x of some matrices, wherever in the layer they are used:
    a mixture's experts have no modules of their own.

    Args:
        units: the layer's matrices.
        parameters: its parameters by address (`Unit.inputs`).
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.sums: dict[tuple[int, int], torch.Tensor] = {}
        self.magnitudes: dict[tuple[int, int], torch.Tensor] = {}
        self._places: dict[int, tuple[int, int]] = {}
        for parameter in layer.parameters():
            experts = list(parameter.data) if parameter.dim() == 3 else [parameter.data]
            for number, value in enumerate(experts):
                expert = number if parameter.dim() == 3 else -1
                self._places[value.data_ptr()] = (id(parameter), expert)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            self._add(args[0], args[1])
        elif function is torch.addmm:
            self._add(args[1], args[2])
        return function(*args, **(kwargs or {}))

    def _add(self, inputs: torch.Tensor, weight: torch.Tensor) -> None:
        place = self._places.get(weight.data_ptr())
        if place is not None:
            rows = inputs.reshape(-1, inputs.shape[-1]).float()
            product, magnitudes = rows.t() @ rows, rows.abs().sum(0)
            self.sums[place] = self.sums[place] + product if place in self.sums else product
            self.magnitudes[place] = self.magnitudes[place] + magnitudes if place in self.magnitudes else magnitudes
