"""A release, a load on it, and experiments on both, one after the other. The command and the cluster's tests use it."""

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from types import TracebackType
from typing import Self

from lockstep_tools.arguments import API_KEY_VARIABLE
from lockstep_tools.chaos.experiments import Breaks, Experiment, Victim, scripts
from lockstep_tools.chaos.kubectl import run_script
from lockstep_tools.chaos.load_pod import NAME, LoadPod
from lockstep_tools.chaos.outcome import Outcome, assign, conclude
from lockstep_tools.chaos.placement import place_on_two_nodes
from lockstep_tools.chaos.release import ROUTER, STATE, WORKER, Release, of
from lockstep_tools.chaos.trial import Trial, run_trial
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.load.comparison import compare
from lockstep_tools.load.history import History

_CLEAN_S = 900.0


def clean(release: Release, say: Callable[[str], None]) -> bool:
    """Undo what interrupted experiments have left of a release, and report each thing; returns whether there was any.

    Raises:
        CommandError: something cannot be undone now; the record of it stays in the cluster.
    """
    output = run_script(scripts() / "clean" / "run.sh", _environment(release), _CLEAN_S)
    for line in output.splitlines():
        say(f"left by an interrupted run: {line}")
    return bool(output)


def lacks(experiment: Experiment, components: Set[str]) -> bool:
    """Whether a release with these components cannot have this experiment."""
    return bool(experiment.component) and experiment.component not in components


def expected(experiment: Experiment, components: Set[str], *, resume: bool) -> Experiment:
    """The experiment for a release with these components.

    Clients that resume find their streams at another router if there is a state server: then none may break.
    """
    if resume and STATE in components and experiment.breaks is Breaks.OF_THE_ROUTER:
        return replace(experiment, breaks=Breaks.NONE)
    return experiment


def _environment(release: Release) -> dict[str, str]:
    return {"NAMESPACE": release.kubectl.namespace, "RELEASE": release.name}


class Laboratory:
    """Used as `with Laboratory(release) as laboratory: laboratory.run(experiment)`; the load streams meanwhile."""

    def __init__(
        self,
        release: Release,
        *,
        clients: int = 8,
        image: str | None = None,
        slack: float = 1.0,
        key: str | None = None,
        resume: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Args: `image` is the load's (None: the tools' image beside the router's), `slack` as in `Outcome`; `key` is
        the API key of the load; with `resume` its streams survive routers that die.
        """
        self._release = release
        self._resume = resume
        self._scripts = scripts()
        self._environment = (
            _environment(release)
            | ({"IMAGE": image} if image else {})
            | {API_KEY_VARIABLE: key or "", "RESUME": "--resume" if resume else ""}
        )
        self.load = LoadPod(release.kubectl, self._scripts / "load" / "run.sh", self._environment, clients=clients)
        self.outcomes: list[Outcome] = []
        """The outcomes of the experiments so far, also of one that was interrupted after its first trial."""
        self.problems: list[str] = []
        """Problems of streams that ended before, between or after the experiments."""
        self._judged = 0
        self._slack = slack
        self._say = say

    def __enter__(self) -> Self:
        components = {pod.component for pod in self._release.require()}
        for needed in (WORKER, ROUTER):
            if needed not in components:
                raise CommandError(f"release {self._release.name} has no {needed}", UNUSABLE)
        if clean(self._release, self._say):
            self._release.await_settled()
        # Some experiments disturb the node of a worker: the load runs on another node.
        self.load.avoid = of(self._release.ready_pods(), WORKER)[0].node
        self.load.__enter__()
        self._say(f"all clients stream, {len(self.load.undisturbed)} answers are known")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.load.stop()
                self._judge_undisturbed(self._unjudged(), "after the last experiment")
        finally:
            try:
                self.load.__exit__(kind, error, trace)
            finally:
                clean(self._release, lambda _: None)

    def run(self, experiment: Experiment, times: int = 1) -> Outcome:
        """Run the experiment `times` times.

        Raises:
            CommandError: a script failed, something took too long, or the release lacks what the experiment disturbs.
        """
        components = {pod.component for pod in self._release.require()}
        if lacks(experiment, components):
            raise CommandError(f"{experiment.name}: the release has no {experiment.component}", UNUSABLE)
        experiment = expected(experiment, components, resume=self._resume)
        trials: list[Trial] = []
        try:
            for number in range(times):
                trials.append(self._try(experiment, number, times))  # noqa: PERF401 - what there is counts, too
        finally:
            if trials:
                before = assign(trials, self._unjudged())
                self._judge_undisturbed(before, f"before {experiment.name}")
                self.outcomes.append(conclude(experiment, trials, self.load.undisturbed, self._slack))
        return self.outcomes[-1]

    def _try(self, experiment: Experiment, number: int, times: int) -> Trial:
        node = str(self._release.kubectl.json("get", "pod", NAME)["spec"]["nodeName"])
        if experiment.victim is Victim.NODE:
            place_on_two_nodes(self._release)
        began_s = time.monotonic()
        trial = run_trial(
            experiment,
            self._release,
            self.load,
            self._scripts,
            number=number,
            load_node=node,
            environment=self._environment,
        )
        victims = trial.victims
        who = victims.node or ", ".join([*victims.workers, *victims.routers]) or experiment.victim
        self._say(
            f"{experiment.name} {number + 1}/{times} ({who}): recovered after "
            f"{trial.recovered_s - trial.fault_s:.1f} s, {time.monotonic() - began_s:.0f} s in all"
        )
        return trial

    def _unjudged(self) -> list[History]:
        """The streams that have ended since the last call."""
        ended = self.load.ended[self._judged :]
        self._judged += len(ended)
        return ended

    def _judge_undisturbed(self, histories: Sequence[History], when: str) -> None:
        self.problems += [f"{when}: {problem}" for problem in compare(histories, self.load.undisturbed).problems]
