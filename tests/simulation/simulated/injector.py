"""Applies faults to a world, and takes them back when their time is over."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from simulated.faults import Fault
from simulated.network import JITTER_S, Path
from simulated.state import AWAY
from simulated.worker import Mischief, Worker

if TYPE_CHECKING:
    from simulated.world import World


def inject(world: "World", fault: Fault) -> None:
    """Let the fault happen, if its target is alive."""
    world.kernel.trace("fault", fault)
    world.counts[fault.kind] += 1
    _ACTIONS[fault.kind](world, fault)


def _crash(world: "World", fault: Fault, *, silently: bool = False) -> None:
    worker = world.workers[fault.worker]
    if not worker.is_listening or worker.is_stopped:
        return
    worker.die(silently=silently)
    if silently:
        for connection in world.network.of(worker.target):
            connection.watch()
    world.kernel.after(fault.seconds, lambda: _return(world, fault, worker))


def _return(world: "World", fault: Fault, died: Worker) -> None:
    if world.workers[fault.worker] is not died:
        return
    # The machine answers again, so old connections are reset.
    died.is_reachable = True
    for connection in world.network.of(died.target):
        connection.end_by_worker()
    world.start_worker(fault.worker, died.target)
    world.kernel.trace("worker returns", fault.worker)


def _lose_ranks(world: "World", fault: Fault) -> None:
    if not world.workers[fault.worker].is_stopped:
        world.workers[fault.worker].lose_ranks("rank 0 died")


def _hang(world: "World", fault: Fault) -> None:
    world.workers[fault.worker].hang()


def _stop(world: "World", fault: Fault) -> None:
    world.workers[fault.worker].stop(fault.seconds)


def _slow(world: "World", fault: Fault) -> None:
    worker = world.workers[fault.worker]
    worker.slowness = 1.0 + 20.0 * fault.lottery
    world.kernel.after(fault.seconds, lambda: setattr(worker, "slowness", 1.0))


def _misbehave(world: "World", fault: Fault) -> None:
    worker = world.workers[fault.worker]
    kinds = ("old_attempt", "old_epoch", "twice", "gap", "loss", "malformed", "preempts")
    worst = kinds[int(fault.lottery * len(kinds))]
    base = Mischief(old_attempt=0.1, old_epoch=0.1, twice=0.1, preempts=0.01)
    worker.mischief = replace(base, **{worst: 0.05 if worst in ("gap", "loss", "malformed", "preempts") else 0.5})
    world.kernel.after(fault.seconds, lambda: setattr(worker, "mischief", Mischief()))


def _drain(world: "World", fault: Fault) -> None:
    """A rollout: the pod drains, leaves the discovery, and its successor has another address."""
    worker = world.workers[fault.worker]
    if not worker.is_listening or worker.is_stopped or worker.is_draining:
        return
    worker.drain(min(fault.seconds, 2.0), lambda: None)
    target = f"10.0.{int(world.kernel.now * 1e3) % 250 + 1}.{fault.worker}:50051"

    def succeed() -> None:
        if world.workers[fault.worker] is worker:
            world.start_worker(fault.worker, target)
            world.rediscover()

    # The successor may begin before its predecessor has ended.
    world.kernel.after(fault.seconds * 2.0 * fault.lottery, succeed)


def _jump(world: "World", fault: Fault) -> None:
    """The wall clock of a worker's machine jumps, in either direction, and its process starts again."""
    world.wall_offset_ns[fault.worker] += int((fault.lottery - 0.5) * 7200 * 1e9)
    _crash(world, fault)


def _cut(world: "World", fault: Fault, *, up: bool, down: bool) -> None:
    router, target = f"router-{fault.router}", world.workers[fault.worker].target
    ways = [way for way, is_cut in (((router, target), up), ((target, router), down)) if is_cut]
    for source, destination in ways:
        world.network.cut(source, destination)
        world.kernel.after(fault.seconds, partial(world.network.heal, source, destination))


def _flap(world: "World", fault: Fault) -> None:
    """Cut and healed twice a second."""
    for beat in range(int(2 * fault.seconds) + 1):
        once = replace(fault, seconds=0.25)
        world.kernel.after(0.5 * beat, partial(_cut, world, once, up=True, down=True))


def _delay(world: "World", fault: Fault) -> None:
    """Frames take up to a second; those of other connections overtake them."""
    router, target = f"router-{fault.router}", world.workers[fault.worker].target
    for source, destination in ((router, target), (target, router)):
        path = world.network.path(source, destination)
        path.jitter_s = fault.lottery
        world.kernel.after(fault.seconds, partial(_end_delay, world, path))


def _end_delay(world: "World", path: Path) -> None:
    # What is on its way arrives last.
    path.healed_at, path.jitter_s = world.kernel.now + path.jitter_s, JITTER_S


def _reset(world: "World", fault: Fault) -> None:
    for connection in world.network.between(f"router-{fault.router}", world.workers[fault.worker].target):
        connection.end_by_worker()
        connection.end_by_router()


def _half_open(world: "World", fault: Fault, *, for_worker: bool) -> None:
    for connection in world.network.between(f"router-{fault.router}", world.workers[fault.worker].target):
        connection.vanish(for_worker=for_worker)


def _kill_router(world: "World", fault: Fault) -> None:
    process = world.routers[fault.router]
    if process is not None and process.router is not None:
        world.kill_router(fault.router)
        world.kernel.after(fault.seconds, partial(world.start_router, fault.router))


def _drain_router(world: "World", fault: Fault) -> None:
    """SIGTERM: it drains and ends. Its successor has its name and starts some time after."""
    process = world.routers[fault.router]
    if process is not None and process.router is not None and not process.is_leaving:
        world.drain_router(fault.router, then_s=fault.seconds)


def _jump_router(world: "World", fault: Fault) -> None:
    """The wall clock of a router's machine jumps, in either direction: nothing may depend on it."""
    process = world.routers[fault.router]
    if process is not None:
        process.loop.wall_offset_s += (fault.lottery - 0.5) * 7200


def _reset_clients(world: "World", fault: Fault) -> None:
    world.wire.reset(fault.router)


def _cut_clients(world: "World", fault: Fault) -> None:
    world.wire.cut(fault.router, fault.seconds)


def _freeze_router(world: "World", fault: Fault) -> None:
    """The process is stopped, or its machine is suspended: its clock jumps when it goes on."""
    process = world.routers[fault.router]
    if process is not None:
        process.loop.freeze(fault.seconds)
        for connection in world.network.of(process.name):
            connection.watch()


def _discover(world: "World", fault: Fault, *, some: bool) -> None:
    process = world.routers[fault.router]
    if process is None:
        return
    # The first worker stays listed: a sanctuary is known.
    kept = sorted(world.addresses(), key=lambda each: each.worker_id or "")[:-1] if some else []
    process.call(lambda: process.discovery.set(frozenset(kept)))
    world.kernel.after(fault.seconds, world.rediscover)


def _fail_discovery(world: "World", fault: Fault) -> None:
    process = world.routers[fault.router]
    if process is None or process.discovery.report is None:
        return
    report = process.discovery.report
    process.call(lambda: report.fail("the API server does not answer"))
    world.kernel.after(fault.seconds, lambda: process.call(report.succeed))


def _lose_state(world: "World", fault: Fault) -> None:
    """The state server is away, or nothing reaches it, or nothing that it answers arrives."""
    state = world.disturbed_state()
    state.away = AWAY[int(fault.lottery * len(AWAY))]
    world.kernel.after(fault.seconds, lambda: setattr(state, "away", ""))


def _delay_state(world: "World", fault: Fault) -> None:
    """Its answers are late by up to a second."""
    state = world.disturbed_state()
    state.late_s = fault.lottery
    world.kernel.after(fault.seconds, lambda: setattr(state, "late_s", 0.0))


def _empty_state(world: "World", _fault: Fault) -> None:
    """It starts again, without a memory."""
    world.disturbed_state().forget()


_ACTIONS = {
    "crash": _crash,
    "lose node": partial(_crash, silently=True),
    "lose ranks": _lose_ranks,
    "hang": _hang,
    "stop": _stop,
    "slow": _slow,
    "mischief": _misbehave,
    "drain": _drain,
    "wall clock": _jump,
    "cut up": partial(_cut, up=True, down=False),
    "cut down": partial(_cut, up=False, down=True),
    "cut both": partial(_cut, up=True, down=True),
    "flap": _flap,
    "reset": _reset,
    "half-open worker": partial(_half_open, for_worker=True),
    "half-open router": partial(_half_open, for_worker=False),
    "delay": _delay,
    "kill router": _kill_router,
    "freeze router": _freeze_router,
    "drain router": _drain_router,
    "router clock": _jump_router,
    "reset clients": _reset_clients,
    "cut clients": _cut_clients,
    "discover nothing": partial(_discover, some=False),
    "discover some": partial(_discover, some=True),
    "discovery fails": _fail_discovery,
    "state away": _lose_state,
    "state late": _delay_state,
    "state forgets": _empty_state,
}
