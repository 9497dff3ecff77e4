"""What happens in one simulation: a pure function of its seed. Without one part, the others are the same."""

from dataclasses import dataclass, replace
from random import Random

from lockstep_router.settings import RouterSettings

from simulated import model, worker
from simulated.faults import KEEPING, SHARED, USUAL, Fault, choose_faults
from simulated.state import TARGET
from simulated.visits import Visit, choose_visit


@dataclass(frozen=True)
class Request:
    """A client's request, and what the client does."""

    name: str
    at: float
    lottery: float
    """Chooses among the routers that live then."""
    prompt_ids: tuple[int, ...]
    is_text: bool
    max_tokens: int
    seed: int
    session: str
    choices: int = 1
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    timeout_s: float | None = None
    pause_s: float = 0.0
    """The client reads nothing for so long, sometimes."""
    leaves_after_tokens: int | None = None
    leaves_after_s: float | None = None
    retries: bool = False
    """It asks again, another router, when its connection breaks."""
    visit: Visit | None = None
    """Its stream is resumable, and it reads over HTTP."""

    @property
    def is_poison(self) -> bool:
        return self.prompt_ids[0] == model.POISON_ID


@dataclass(frozen=True)
class Plan:
    """One simulation."""

    seed: int
    routers: int
    workers: tuple[worker.Plan, ...]
    has_sanctuary: bool
    """No fault touches the first worker and the paths to it, and it has room for all."""
    settings: dict[str, object]
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    window_s: float
    """Requests arrive and faults begin in this time."""
    shares_state: bool = False
    """The routers share a state server."""
    keeps_streams: bool = False
    """No fault touches the state server and the last router, and none loses a stream that the state server has."""

    @property
    def streams(self) -> int:
        return sum(request.choices for request in self.requests)

    def without(self, *, faults: frozenset[int] = frozenset(), requests: frozenset[int] = frozenset()) -> "Plan":
        """The plan without the faults and requests of these indices."""
        return replace(
            self,
            faults=tuple(each for index, each in enumerate(self.faults) if index not in faults),
            requests=tuple(each for index, each in enumerate(self.requests) if index not in requests),
        )


@dataclass(frozen=True)
class Scale:
    """How large simulations are."""

    requests: int = 90
    window_s: float = 10.0
    faults: tuple[int, int] = (5, 16)
    """Fewest and most."""
    kinds: tuple[str, ...] = USUAL
    """Of faults, to choose from."""
    longest_s: float = 6.0
    """Longest time until a fault is over."""
    visits: float = 0.35
    """Share of the requests whose streams are resumable."""
    shares_state: bool = False
    """The routers share a state server."""


USUAL_SCALE = Scale()
SHARED_SCALE = Scale(requests=60, kinds=SHARED, visits=0.7, shares_state=True)


def make_plan(seed: int, scale: Scale = USUAL_SCALE) -> Plan:
    """The plan of a seed."""
    rng = Random(f"{seed}/plan")
    routers, workers = rng.choice((1, 2, 2, 3)), rng.choice((2, 3, 3, 4))
    has_sanctuary = rng.random() < 0.4
    has_poison = not has_sanctuary and rng.random() < 0.3
    plans = [
        worker.Plan(
            max_seqs=rng.choice((2, 4, 8, 16)),
            step_s=rng.uniform(0.02, 0.04),
            most_per_step=rng.choice((1, 2, 4)),
            restart_s=rng.uniform(0.1, 1.0),
        )
        for _ in range(workers)
    ]
    if has_sanctuary:
        plans[0] = replace(plans[0], max_seqs=4 * scale.requests)
    settings, kinds, keeps_streams, spared = _settings(rng), scale.kinds, False, 0
    if scale.shares_state:
        rng = Random(f"{seed}/state")
        routers, keeps_streams = rng.choice((2, 2, 3)), rng.random() < 0.5
        settings |= {"state_server": TARGET, "resume_window_s": rng.choice((2.0, 3.0))}
        if keeps_streams:
            settings["exact_failover"] = "prefer"
            kinds, spared = tuple(kind for kind in kinds if kind in KEEPING), 1
    return Plan(
        seed,
        routers,
        tuple(plans),
        has_sanctuary,
        settings,
        tuple(_request(Random(f"{seed}/request/{n}"), n, scale, has_poison=has_poison) for n in range(scale.requests)),
        choose_faults(
            Random(f"{seed}/faults"),
            routers - spared,
            workers,
            scale.window_s,
            scale.faults,
            kinds,
            scale.longest_s,
            spare_first=has_sanctuary,
        ),
        scale.window_s,
        scale.shares_state,
        keeps_streams,
    )


def _settings(rng: Random) -> dict[str, object]:
    return {
        "policy": rng.choice(
            ("sticky", "hybrid", "stateless", "round_robin", "weighted", "least_loaded", "prefix_aware")
        ),
        "heartbeat_timeout_s": rng.choice((0.5, 1.0, 1.5)),
        "first_token_deadline_s": 4.0,
        "inter_token_deadline_s": 2.0,
        "connect_timeout_s": 1.0,
        "max_queue_wait_s": 15.0,
        "max_unread_tokens": rng.choice((8, 64, 4096)),
        "exact_failover": rng.choice(("prefer", "strict")),
        "prefix_index_blocks": 1024,
        "resume_window_s": rng.choice((0.5, 1.0, 2.0)),
        "lame_duck_s": rng.choice((0.0, 0.3)),
        "drain_timeout_s": rng.choice((0.2, 1.0, 3.0)),
        "keepalive_interval_s": 1.0,
    }


def settings_of(plan: Plan, router_id: str) -> RouterSettings:
    return RouterSettings(workers=("nowhere:1",), router_id=router_id, **plan.settings)  # type: ignore[arg-type]


def _request(rng: Random, number: int, scale: Scale, *, has_poison: bool) -> Request:
    prompt = [rng.randrange(model.FIRST_ID, model.VOCAB_SIZE) for _ in range(rng.randint(1, 100))]
    max_tokens = rng.choice((1, 2, rng.randint(3, 30), rng.randint(10, 100)))
    request = Request(
        name=f"r{number}",
        at=0.2 + rng.random() * scale.window_s,
        lottery=rng.random(),
        prompt_ids=tuple(prompt),
        is_text=rng.random() < 0.3,
        max_tokens=max_tokens,
        seed=rng.getrandbits(62),
        session=f"s{rng.randrange(20)}",
        choices=rng.choice((1,) * 9 + (2,)),
        retries=rng.random() < 0.7,
    )
    if has_poison and rng.random() < 0.03:
        return replace(request, prompt_ids=(model.POISON_ID, *prompt), max_tokens=max(8, max_tokens), choices=1)
    return _with_visit(rng, _with_habits(rng, request), scale.visits)


def _with_visit(rng: Random, request: Request, share: float) -> Request:
    """Let a client use HTTP and come back; then it has no habits that are for other clients alone."""
    if rng.random() >= share:
        return request
    visit = choose_visit(rng, request.max_tokens)
    return replace(request, visit=visit, pause_s=0.0, leaves_after_tokens=None, leaves_after_s=None)


def _with_habits(rng: Random, request: Request) -> Request:
    """A client that does more than read: most do nothing of it."""
    habit, tokens = rng.random(), max(1, request.max_tokens // 2)
    if habit < 0.08:
        return replace(request, leaves_after_tokens=rng.randint(1, tokens))
    if habit < 0.14:
        return replace(request, leaves_after_s=rng.uniform(0.0, 2.0))
    if habit < 0.20:
        return replace(request, pause_s=rng.uniform(0.1, 1.0))
    if habit < 0.28:
        return replace(request, timeout_s=rng.uniform(0.2, 8.0))
    if habit < 0.36:
        return replace(request, stop_ids=(_token_of(request, rng),))
    if habit < 0.44:
        return replace(request, stops=(model.text_of(_token_of(request, rng)), "zz"), choices=1)
    return request


def _token_of(request: Request, rng: Random) -> int:
    """A token that the answer has, if nothing ends it earlier."""
    sampling = model.inference_pb2.Sampling(seed=request.seed, max_tokens=request.max_tokens)
    return model.Tokens(request.prompt_ids, sampling).at(rng.randrange(request.max_tokens))
