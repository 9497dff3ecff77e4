"""The settings of all sampling rows as arrays, and those of a step's rows on the device.

Rows are grouped by what has to be computed for them, so that a step takes a number of launches that does not grow with
its rows. As long as the same requests run, their settings stay on the device. On the CPU a group is a tile of a few
rows, whose intermediate results stay in its caches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from lockstep_common.protocol import MAX_LOGPROBS
from numpy.typing import NDArray

from lockstep_engine.plan import RowSampling
from lockstep_engine.transfers import to_device, to_device_at_once

TILE = 2**18
"""Logits of a tile on the CPU: 1 MiB."""
_DEEPEST = 1024
"""Up to this top_k only the largest probabilities are sorted."""
_SHARE = 4
"""And up to this share of the vocabulary: a quarter."""
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _FREQUENCY, _PRESENCE = range(6)


@dataclass(frozen=True)
class Penalties:
    """Rows with penalties."""

    rows: torch.Tensor
    """[n], int64: logits rows."""
    sampling_rows: torch.Tensor
    """[n], int64."""
    repetition: torch.Tensor
    """[n, 1], float32; as the next two."""
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True)
class Cut:
    """Rows of which the least likely tokens are cut off."""

    rows: torch.Tensor
    """[n], int64: rows of the group."""
    depth: int
    """So many of the largest probabilities decide: one, as many as the largest top_k, or all."""
    min_p: torch.Tensor
    """[n, 1], float32."""
    last: torch.Tensor | None
    """[n, 1], int64: top_k - 1. None: only min_p decides."""
    shallow: bool
    """Some row's top_k is below `depth`."""
    top_p: torch.Tensor | None
    """[n, 1], float64; 1: no limit. None: for no row."""


@dataclass(frozen=True)
class Draw:
    """Rows that draw."""

    rows: torch.Tensor
    """[n], int64: logits rows."""
    numbers: NDArray[np.intp]
    """The same on the host."""
    temperature: torch.Tensor
    """[n, 1], float32, above 0."""
    cuts: list[Cut]


@dataclass(frozen=True)
class Listed:
    """Rows of which log probabilities are wanted."""

    rows: torch.Tensor
    """[n], int64: logits rows."""
    numbers: NDArray[np.intp]
    """The same on the host."""
    counts: NDArray[np.int64]
    """[n]: how many of the most likely tokens are wanted."""
    depth: int
    """So many are listed."""


@dataclass(frozen=True)
class Kinds:
    """What some rows of a step need."""

    draws: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @property
    def cuts(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_k or self.top_p or self.min_p


@dataclass(frozen=True)
class RowChoices:
    """How the kernels choose the tokens of all rows."""

    settings: torch.Tensor
    """[logits rows, 5], float64: see `triton_sampling.choose`."""
    kinds: Kinds


@dataclass(frozen=True)
class StepSettings:
    """The settings of a step's rows, on the device."""

    sampling_rows: torch.Tensor
    """[logits rows], int64; empty if there are `choices`, which have them."""
    greedy: torch.Tensor | None
    """[n], int64: logits rows that take the most likely token; None: all."""
    draws: list[Draw]
    penalties: list[Penalties]
    biased: torch.Tensor | None
    """[n], int64: indices of logits, rows one after the other, that get `bias`."""
    bias: torch.Tensor | None
    """[n], float32."""
    forbidden: torch.Tensor | None
    """[n], int64: indices of logits that become -inf."""
    listed: list[Listed]
    choices: RowChoices | None = None
    """For the GPU's kernels; then there are no `draws`, and `greedy` means nothing."""

    @property
    def plain(self) -> bool:
        """Whether all logits stay as the model made them."""
        return not self.penalties and self.biased is None and self.forbidden is None

    @property
    def only_greedy(self) -> bool:
        """Whether all rows take the most likely token of the model, and nothing else is wanted of them."""
        return self.greedy is None and self.plain and not self.listed


@dataclass
class _Lists:
    """A list of token ids for each sampling row, all in one array, with a value for each id."""

    sizes: NDArray[np.int64]
    _ids: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    _values: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    _begins: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    _flat: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None

    def set(self, row: int, ids: Sequence[int], values: Sequence[float]) -> None:
        """The list of a row's new request."""
        if not (len(ids) or self.sizes[row]):
            return
        self.sizes[row], self._flat = 0, None
        self._ids.pop(row, None)
        self._values.pop(row, None)
        if len(ids):
            self._ids[row], self._values[row] = np.array(ids, np.int64), np.array(values, np.float32)
            self.sizes[row] = len(ids)  # last: if memory runs out before, the list is empty

    def of(self, rows: NDArray[np.intp], vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Indices of logits of these rows, one after the other, and their values; None: their lists are empty."""
        sizes = self.sizes[rows]
        total = int(sizes.sum())
        if not total:
            return None
        if self._flat is None:
            self._begins = np.zeros(len(self.sizes), np.int64)
            held = sorted(self._ids)
            self._begins[held] = np.cumsum([0, *(len(self._ids[row]) for row in held[:-1])])
            self._flat = (
                np.concatenate([self._ids[row] for row in held]),
                np.concatenate([self._values[row] for row in held]),
            )
        ids, values = self._flat
        places = np.repeat(self._begins[rows] - (np.cumsum(sizes) - sizes), sizes) + np.arange(total)
        return np.repeat(np.arange(len(rows)), sizes) * vocabulary + ids[places], values[places]


class SamplingTable:
    """The settings of the requests that have sampling rows. `kernels`: those of a GPU choose the tokens."""

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device, *, kernels: bool = False) -> None:
        self._kernels = kernels
        self._vocabulary = vocab_size
        self._device = device
        self._tile = max(1, TILE // vocab_size) if device.type == "cpu" else max_seqs
        self._numbers = np.zeros((max_seqs, 6))
        self._top_k = np.zeros(max_seqs, np.int64)
        self._logprobs = np.full(max_seqs, -1, np.int64)
        self._min_tokens = np.zeros(max_seqs, np.int64)
        self._penalised = np.zeros(max_seqs, np.bool_)
        self._biases = _Lists(np.zeros(max_seqs, np.int64))
        self._forbidden = _Lists(np.zeros(max_seqs, np.int64))
        self._last: tuple[bytes, StepSettings] | None = None

    def set(self, sampling: RowSampling) -> None:
        """A sampling row gets a new request."""
        row = sampling.sampling_row
        self._last = None
        self._numbers[row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        # A limit that is no limit is kept as 0, which also keeps any integer within the array's type.
        self._top_k[row] = sampling.top_k if 0 < sampling.top_k < self._vocabulary else 0
        self._logprobs[row] = max(-1, min(sampling.logprobs, self._vocabulary))
        self._min_tokens[row] = sampling.min_tokens
        self._penalised[row] = penalised(sampling)
        bias: Mapping[int, float] = sampling.logit_bias
        self._biases.set(row, list(bias), list(bias.values()))
        self._forbidden.set(row, sampling.forbidden_ids, [0.0] * len(sampling.forbidden_ids))

    def clear(self, row: int) -> None:
        """A sampling row takes the most likely token until its next request."""
        self._last = None
        self._numbers[row] = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
        self._top_k[row], self._logprobs[row], self._min_tokens[row], self._penalised[row] = 0, -1, 0, False
        self._biases.set(row, (), ())
        self._forbidden.set(row, (), ())

    def of(self, sampling_rows: NDArray[np.int32], emitted: NDArray[np.int32]) -> StepSettings:
        """The settings for a step.

        Args:
            sampling_rows: [logits rows], the sampling row of each.
            emitted: [logits rows], output tokens before this one.
        """
        rows = sampling_rows.astype(np.intp)
        short = emitted < self._min_tokens[rows]
        key = rows.tobytes() + short.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, self._settings(rows, short)
        return self._last[1]

    def _settings(self, rows: NDArray[np.intp], short: NDArray[np.bool_]) -> StepSettings:
        random = (self._numbers[rows, _TEMPERATURE] != 0).nonzero()[0]
        greedy = None
        if len(random) and not self._kernels:
            greedy = self._put((self._numbers[rows, _TEMPERATURE] == 0).nonzero()[0])
        bias = self._biases.of(rows, self._vocabulary)
        limited = short.nonzero()[0]
        forbidden = self._forbidden.of(rows[limited], self._vocabulary)
        if forbidden is not None:
            places = forbidden[0]
            places = limited[places // self._vocabulary] * self._vocabulary + places % self._vocabulary
        return StepSettings(
            sampling_rows=self._put(rows[:0] if self._kernels else rows),
            greedy=greedy,
            draws=[] if self._kernels else [self._draw(rows, part) for part in self._tiles(random)],
            penalties=[self._penalties(rows, part) for part in self._tiles(self._penalised[rows].nonzero()[0])],
            biased=None if bias is None else self._put(bias[0]),
            bias=None if bias is None else self._put(bias[1]),
            forbidden=None if forbidden is None else self._put(places),
            listed=list(self._listed(rows)),
            choices=self._choices(rows) if self._kernels else None,
        )

    def _choices(self, rows: NDArray[np.intp]) -> RowChoices:
        temperature, top_p, min_p = self._numbers[rows][:, [_TEMPERATURE, _TOP_P, _MIN_P]].T
        random, top_k = temperature != 0, self._top_k[rows]
        scale = np.zeros(len(rows))
        scale[random] = np.log2(np.e) / np.maximum(temperature[random], np.finfo(np.float32).tiny)
        kinds = Kinds(
            draws=bool(random.any()),
            top_k=bool((random & (top_k > 0)).any()),
            top_p=bool((random & (top_p < 1)).any()),
            min_p=bool((random & (min_p > 0)).any()),
        )
        return RowChoices(self._put(np.stack([rows, scale, top_k, top_p, min_p], axis=1)), kinds)

    def _penalties(self, rows: NDArray[np.intp], part: NDArray[np.intp]) -> Penalties:
        columns = [_REPETITION, _FREQUENCY, _PRESENCE]
        numbers = self._numbers[rows[part]][:, columns].T.astype(np.float32)
        places, owners, factors = to_device_at_once([part, rows[part], numbers[:, :, None]], self._device)
        return Penalties(places, owners, *factors)

    def _draw(self, rows: NDArray[np.intp], part: NDArray[np.intp]) -> Draw:
        temperature = np.maximum(self._numbers[rows[part], _TEMPERATURE], np.finfo(np.float32).tiny)
        return Draw(
            rows=self._put(part),
            numbers=part,
            temperature=self._put(temperature.astype(np.float32)).unsqueeze(1),
            cuts=list(self._cuts(rows[part])),
        )

    def _cuts(self, sampling_rows: NDArray[np.intp]) -> Iterator[Cut]:
        """Rows by how many of their largest probabilities decide: few, all, or one."""
        top_k, top_p = self._top_k[sampling_rows], self._numbers[sampling_rows, _TOP_P]
        few = (top_k > 0) & (top_k <= min(_DEEPEST, self._vocabulary // _SHARE))
        many = ~few & ((top_k > 0) | (top_p < 1))
        one = ~few & ~many & (self._numbers[sampling_rows, _MIN_P] > 0)
        for chosen in (few, many, one):
            part = chosen.nonzero()[0]
            if len(part):
                depth = 1 if chosen is one else int(top_k[part].max()) if chosen is few else self._vocabulary
                limits = np.minimum(np.where(top_k[part] > 0, top_k[part], depth), depth)
                nucleus = bool((top_p[part] < 1).any())
                yield Cut(
                    rows=self._put(part),
                    depth=depth,
                    min_p=self._put(self._numbers[sampling_rows[part], _MIN_P].astype(np.float32)).unsqueeze(1),
                    last=None if chosen is one else self._put(limits - 1).unsqueeze(1),
                    shallow=bool((limits < depth).any()),
                    top_p=self._put(top_p[part]).unsqueeze(1) if nucleus else None,
                )

    def _listed(self, rows: NDArray[np.intp]) -> Iterator[Listed]:
        wanted = self._logprobs[rows]
        if (wanted < 0).all():
            return
        if self._device.type == "cpu":
            groups = [(int(count), (wanted == count).nonzero()[0]) for count in np.unique(wanted[wanted >= 0])]
        else:
            # Which of two equally likely tokens comes first may depend on how many are listed, so that number is fixed.
            groups = [(MAX_LOGPROBS, (wanted >= 0).nonzero()[0])]
        for depth, numbers in groups:
            for part in self._tiles(numbers):
                yield Listed(self._put(part), part, wanted[part], min(depth, self._vocabulary))

    def _tiles(self, rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        return [rows[begin : begin + self._tile] for begin in range(0, len(rows), self._tile)]

    def _put(self, array: NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self._device)


def penalised(sampling: RowSampling) -> bool:
    """Whether a request has penalties."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
