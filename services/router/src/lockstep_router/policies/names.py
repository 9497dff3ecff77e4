"""The policies by their names in the settings `policy` and `model_policies`."""

from collections.abc import Callable
from typing import Protocol

from lockstep_router.policies.custom import Custom, load
from lockstep_router.policies.facts import Policy
from lockstep_router.policies.hybrid import Hybrid
from lockstep_router.policies.least_loaded import LeastLoaded
from lockstep_router.policies.prefix_aware import PrefixAware
from lockstep_router.policies.round_robin import RoundRobin
from lockstep_router.policies.stateless import Stateless
from lockstep_router.policies.sticky import Sticky
from lockstep_router.policies.weighted import Weighted


class PolicySettings(Protocol):
    """The settings that policies use."""

    @property
    def queue_threshold(self) -> int:
        """Requests in a worker's queue above which sessions leave it."""

    @property
    def load_bound(self) -> float:
        """A worker's most requests, as a multiple of the average."""


_BUILT_IN: dict[str, Callable[[PolicySettings], Policy]] = {
    "sticky": lambda settings: Sticky(settings.queue_threshold),
    "hybrid": lambda settings: Hybrid(settings.load_bound, settings.queue_threshold),
    "stateless": lambda _: Stateless(),
    "round_robin": lambda _: RoundRobin(),
    "weighted": lambda settings: Weighted(settings.queue_threshold),
    "least_loaded": lambda _: LeastLoaded(),
    "prefix_aware": lambda settings: PrefixAware(settings.load_bound),
}


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """A new policy, for one model.

    Raises:
        ValueError: it is none of the built-in ones, and its entry point cannot be used.
    """
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        return built_in(settings)
    return Custom(name, load(name), fallback=Sticky(settings.queue_threshold))


def check_policy(name: str) -> None:
    """Raise ValueError for a name that `make_policy` refuses."""
    if name not in _BUILT_IN:
        try:
            load(name)
        except ValueError as error:
            raise ValueError(f"is none of {', '.join(_BUILT_IN)}, and {error}") from error
