"""A release, a load on it, and experiments on both, one after the other. The command and the cluster's tests use it."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from lockstep_tools.chaos.experiments import Experiment, Victim, scripts
from lockstep_tools.chaos.load_pod import NAME, LoadPod
from lockstep_tools.chaos.outcome import Outcome, assign, conclude
from lockstep_tools.chaos.release import WORKER, Release, of
from lockstep_tools.chaos.spread import spread_out
from lockstep_tools.chaos.trial import Trial, run_trial
from lockstep_tools.history import History
from lockstep_tools.verdict import judge


class Laboratory:
    """Used as `with Laboratory(release) as laboratory: laboratory.run(experiment)`; the load streams meanwhile."""

    def __init__(
        self,
        release: Release,
        *,
        clients: int = 8,
        image: str | None = None,
        slack: float = 1.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Args: `image` of the load, that of the release's tools when None; `slack` as of `Outcome`."""
        self._release = release
        self._scripts = scripts()
        self._environment = {"NAMESPACE": release.kubectl.namespace, "RELEASE": release.name}
        self._environment |= {"IMAGE": image} if image else {}
        # One worker's node is disturbed by some experiments: the load goes to another one.
        self._avoid = of(release.whole_pods(), WORKER)[0].node
        self.load = LoadPod(
            release.kubectl,
            self._scripts / "load" / "run.sh",
            self._environment | {"AVOID": self._avoid},
            clients=clients,
        )
        self.outcomes: list[Outcome] = []
        """Of the experiments so far, also of one that was broken off after its first trial."""
        self.problems: list[str] = []
        """Of streams that ended before, between and after the experiments."""
        self._judged = 0
        self._slack = slack
        self._say = say

    def __enter__(self) -> Self:
        self.load.__enter__()
        self._say(f"all clients stream, {len(self.load.calm)} answers are known")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.load.stop()
                self._judge_undisturbed(self._unjudged(), "after the last experiment")
        finally:
            self.load.__exit__(kind, error, trace)

    def run(self, experiment: Experiment, times: int = 1) -> Outcome:
        """Make the experiment so many times.

        Raises:
            CommandError: a script failed, or something took too long.
        """
        trials: list[Trial] = []
        try:
            for number in range(times):
                trials.append(self._try(experiment, number, times))  # noqa: PERF401 - what there is counts, too
        finally:
            if trials:
                before = assign(trials, self._unjudged())
                self._judge_undisturbed(before, f"before {experiment.name}")
                self.outcomes.append(conclude(experiment, trials, self.load.calm, self._slack))
        return self.outcomes[-1]

    def _try(self, experiment: Experiment, number: int, times: int) -> Trial:
        node = str(self._release.kubectl.json("get", "pod", NAME)["spec"]["nodeName"])
        if experiment.victim is Victim.NODE:
            spread_out(self._release)
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
        self.problems += [f"{when}: {problem}" for problem in judge(histories, self.load.calm).problems]
