"""How fast a worker is: measured times, compared with those of other workers for work of the same size.

A step takes longer with more streams in it, a first token longer with a longer prompt and a fuller batch. So every
time belongs to a class of sizes, within which they differ by less than a factor of two, and is divided by the others'
median in the same class or, if they have none, by what is usual for the worker itself. A slow worker gathers streams,
so its batches may be larger than all others': then a bound is taken from their smaller ones. What a class cannot
separate: prompts of other routers in the same step, and how much of a step is one long prompt. The median of the ratios
and a factor well above 2 cover that.
"""

import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

Size = tuple[int, ...]
"""Classes of one or several sizes of the same work."""

_CLASS_SAMPLES = 16
"""Samples of a class, for its median."""

_CLASS_ENOUGH = 5
_CLASS_FRESH_S = 30.0
"""A class is compared with for this long after its last sample."""

_MAX_CLASSES = 32

_RECENT = 16
"""Samples by which a worker is judged: the median follows a change after nine."""

_RECENT_S = 10.0
"""Older ones do not count."""

_RECENT_ENOUGH = 8

_HABIT_WEIGHT = 0.01
_HABIT_SAMPLES = 40
"""Samples from which on the worker's own habit is known."""


def size_class(count: float) -> int:
    """The class of a size; sizes of one class differ by less than a factor of two."""
    return int(count).bit_length()


class _Class:
    """The times of one class of sizes."""

    def __init__(self) -> None:
        self.at = 0.0
        self.habit_s = 0.0
        self._usual = 0
        self._times_s: deque[float] = deque(maxlen=_CLASS_SAMPLES)
        self._median_s: float | None = None

    def add(self, time_s: float, now: float, *, is_usual: bool) -> None:
        self._times_s.append(time_s)
        self._median_s = None
        self.at = now
        if is_usual:
            self._usual += 1
            self.habit_s += max(_HABIT_WEIGHT, 1 / self._usual) * (time_s - self.habit_s)

    def median_s(self) -> float:
        if self._median_s is None:
            self._median_s = statistics.median(self._times_s)
        return self._median_s

    @property
    def is_enough(self) -> bool:
        return len(self._times_s) >= _CLASS_ENOUGH

    @property
    def has_habit(self) -> bool:
        return self._usual >= _HABIT_SAMPLES


class Pace:
    """The times of one worker; the least recently used class of sizes is dropped first.

    Args:
        floor_s: shorter times count as this one. Ratios of very short times say nothing.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._classes: OrderedDict[Size, _Class] = OrderedDict()
        self._recent: deque[tuple[float, Size, float]] = deque(maxlen=_RECENT)

    def note(self, size: Size, time_s: float, now: float, *, is_usual: bool) -> None:
        """Add a time.

        Args:
            size: the class of its work.
            time_s: in seconds.
            now: the time of the measurement.
            is_usual: whether it belongs to the worker's habit: false while the worker is known to be slow.
        """
        time_s = max(time_s, self._floor_s)
        self._recent.append((now, size, time_s))
        known = self._classes.get(size)
        if known is None:
            known = self._classes[size] = _Class()
            if len(self._classes) > _MAX_CLASSES:
                self._classes.popitem(last=False)
        else:
            self._classes.move_to_end(size)
        known.add(time_s, now, is_usual=is_usual)

    def medians(self, now: float) -> dict[Size, float]:
        """The median time of each class that others can be compared with."""
        return {
            size: each.median_s()
            for size, each in self._classes.items()
            if each.is_enough and now - each.at <= _CLASS_FRESH_S
        }

    def habits(self) -> dict[Size, float]:
        """The worker's own usual time of each class, where it is known."""
        return {size: each.habit_s for size, each in self._classes.items() if each.has_habit}

    def ratio(
        self, references: Iterable[Mapping[Size, float]], now: float, *, with_bounds: bool = False
    ) -> float | None:
        """How many times longer this worker takes than others: the median over its samples of the last 10 s.

        Args:
            references: the times of each other worker by class. In each class their median counts or, if they have
                none, the worker's habit.
            now: the time.
            with_bounds: where there is neither, compare with the longest time that the others' times of other sizes
                allow. Then the worker may be slower than the ratio says.

        Returns:
            The ratio; None if fewer than eight samples can be compared.
        """
        references = list(references)
        habits = self.habits()
        known: dict[Size, float | None] = {}
        ratios = []
        for at, size, time_s in self._recent:
            if now - at > _RECENT_S:
                continue
            if size not in known:
                theirs = [each[size] for each in references if size in each]
                known[size] = statistics.median(theirs) if theirs else habits.get(size)
                if known[size] is None and with_bounds:
                    known[size] = _bound(size, references)
            if reference_s := known[size]:
                ratios.append(time_s / reference_s)
        return statistics.median(ratios) if len(ratios) >= _RECENT_ENOUGH else None

    def forget(self) -> None:
        """Forget what was measured lately; habits stay."""
        self._recent.clear()


def _bound(size: Size, references: Iterable[Mapping[Size, float]]) -> float | None:
    """The longest time that a size may take by what the others take for other sizes, as far as can be said: as long
    as more work or, for sizes of one dimension, on the steepest line through the times of less work.
    """
    times = [(other, time_s) for each in references for other, time_s in each.items()]
    more = [time_s for other, time_s in times if all(theirs >= own for own, theirs in zip(size, other, strict=True))]
    if more:
        return min(more)
    if len(size) > 1 or not times:
        return None
    points = [(_middle(other[0]), time_s) for other, time_s in times]
    count, time_s = max(points)
    slopes = [
        (after - before) / (larger - smaller)
        for smaller, before in points
        for larger, after in points
        if larger > smaller
    ]
    wanted = _middle(size[0])
    proportional_s = time_s * wanted / count
    return min(proportional_s, time_s + max(0.0, *slopes) * (wanted - count)) if slopes else proportional_s


def _middle(class_: int) -> float:
    """The middle of the sizes of a class."""
    return 0.75 * (1 << class_)
