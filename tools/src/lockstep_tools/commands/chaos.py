"""`lockstep chaos`: disturbs a release on a cluster while clients stream from it, and checks what they received."""

import argparse
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lockstep_tools import console
from lockstep_tools.arguments import API_KEY_VARIABLE, api_key, integer, real
from lockstep_tools.chaos.experiments import EXPERIMENTS, Experiment, named
from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.laboratory import Laboratory, clean, lacks
from lockstep_tools.chaos.outcome import Outcome
from lockstep_tools.chaos.release import Release
from lockstep_tools.escaping import harmless
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.load.report import Percentiles

DESCRIPTION = """\
Run fault experiments against a release on the cluster that KUBECONFIG names, while clients stream from it in a pod, and
compare every stream with the same stream undisturbed. The faults are the scripts under k8s/chaos, run with kubectl.
A run starts by undoing what an interrupted one has left; --clean does only that.
Exit code 0 when no stream lost anything or was silent for longer than its limit, 1 when one was, when no stream was
measured or when no router noticed a cut, 2 when there is no such release."""

EXAMPLES = """\
  lockstep chaos --list
  lockstep chaos rank-kill
  lockstep chaos --clean -n serving
  lockstep chaos router-kill --api-key-file key
  lockstep chaos pod-delete node-cut -n serving --release lockstep --times 5 --json > outcome.json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help="experiments, run one after the other; `all` for all that the release can have",
    )
    parser.add_argument("--list", action="store_true", help="show the experiments")
    parser.add_argument("--clean", action="store_true", help="undo what interrupted runs have left, and nothing else")
    parser.add_argument("--release", default="lockstep", help="Helm release (default: %(default)s)")
    parser.add_argument("-n", "--namespace", default="default", help="namespace of the release (default: %(default)s)")
    parser.add_argument(
        "--times", type=integer(1), default=1, metavar="N", help="trials of each experiment (default: 1)"
    )
    parser.add_argument("--clients", type=integer(1), default=8, metavar="N", help="streams at a time (default: 8)")
    parser.add_argument(
        "--slack",
        type=real(1, 1000),
        default=1.0,
        metavar="X",
        help="allow silences of X times their limit (default: 1)",
    )
    parser.add_argument("--image", help="of the load (default: the tools' image beside the router's)")
    parser.add_argument(
        "--api-key-env",
        default=API_KEY_VARIABLE,
        metavar="VARIABLE",
        help="environment variable with the load's API key, if the routers have keys (default: %(default)s)",
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the key, instead")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="the load's streams survive routers that die, like lockstep-client's",
    )
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the experiments and print their outcomes."""
    out = console.output()
    if arguments.list:
        out.print(_listing())
        return 0
    if not arguments.names and not arguments.clean:
        raise CommandError("name an experiment; `lockstep chaos --list` shows them", UNUSABLE)
    is_all = arguments.names == ["all"]
    experiments = [named(name) for name in (EXPERIMENTS if is_all else arguments.names)]
    release = Release(arguments.release, Kubectl(arguments.namespace))
    if arguments.clean:
        return _clean(release, out)
    experiments = _possible(experiments, release, is_all=is_all)
    notes = console.notes()
    laboratory = Laboratory(
        release,
        clients=arguments.clients,
        image=arguments.image,
        slack=arguments.slack,
        resume=arguments.resume,
        key=api_key(arguments.api_key_env, arguments.api_key_file),
        say=lambda sentence: notes.print(sentence, style="dim", markup=False),
    )
    try:
        with laboratory:
            for experiment in experiments:
                laboratory.run(experiment, arguments.times)
    finally:  # also after Ctrl-C or SIGTERM, once the load is removed: what has been found is shown
        _show(laboratory, out, notes, as_json=arguments.json)
    return 0 if all(outcome.holds for outcome in laboratory.outcomes) and not laboratory.problems else FAILED


def _possible(experiments: Sequence[Experiment], release: Release, *, is_all: bool) -> list[Experiment]:
    """Those that the release can have; one that was asked for by its name is not left out."""
    components = {pod.component for pod in release.require()}
    impossible = [each for each in experiments if lacks(each, components)]
    if impossible and not is_all:
        raise CommandError(f"{impossible[0].name}: the release has no {impossible[0].component}", UNUSABLE)
    return [each for each in experiments if each not in impossible]


def _clean(release: Release, out: Console) -> int:
    if not clean(release, lambda sentence: out.print(sentence, markup=False)):
        out.print("nothing is left of interrupted runs")
    return 0


def _show(laboratory: Laboratory, out: Console, notes: Console, *, as_json: bool) -> None:
    outcomes = laboratory.outcomes
    if as_json:
        print(json.dumps([outcome.as_json() for outcome in outcomes], indent=2))
    elif outcomes:
        render(outcomes, out)
    for problem in laboratory.problems:
        notes.print(harmless(problem), style="red", markup=False)


def render(outcomes: Sequence[Outcome], out: Console) -> None:
    """Print outcomes for people."""
    table = Table(title="silence of streams, detection and recovery: p50 / p99 / max", title_justify="left")
    for name in ("experiment", "trials", "streams", "failed", "lost", "doubled", "changed", "excused"):
        table.add_column(name, justify="left" if name == "experiment" else "right")
    for name in ("silence ms", "limit ms", "detected ms", "recovered s", ""):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        seen = outcome.comparison
        numbers = (seen.streams, seen.failed, seen.lost_tokens, seen.doubled_tokens, seen.changed)
        table.add_row(
            outcome.experiment.name,
            str(len(outcome.trials)),
            *map(str, numbers),
            str(seen.excused.total()),
            _cell(outcome.silence_ms),
            f"{1e3 * outcome.experiment.limit_s:.0f}",
            _cell(outcome.detection_ms),
            _cell(outcome.recovery_ms, 1e-3, 1),
            "[green]✓[/green]" if outcome.holds else "[red]✗[/red]",
        )
    out.print(table)
    for outcome in outcomes:
        _explain(outcome, out)


def _explain(outcome: Outcome, out: Console) -> None:
    name = outcome.experiment.name
    for reason, count in outcome.comparison.excused.items():
        out.print(f"  {name}: {count} streams excused: {reason}", markup=False)
    if outcome.connect_failures:
        out.print(f"  {name}: {outcome.connect_failures} connections had to be tried again", markup=False)
    late = [] if outcome.in_time else [f"a silence was longer than {outcome.experiment.limit_s * outcome.slack:g} s"]
    for problem in [*outcome.problems, *outcome.comparison.problems, *late]:
        out.print(f"  {name}: {harmless(problem)}", style="red", markup=False)


def _cell(percentiles: Percentiles | None, unit: float = 1.0, digits: int = 0) -> str:
    if percentiles is None:
        return "-"
    return " / ".join(f"{value * unit:.{digits}f}" for value in (percentiles.p50, percentiles.p99, percentiles.max))


def _listing() -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("NAME", "WHAT HAPPENS", "SILENCE", "STREAMS THAT MAY BREAK", "NEEDS"):
        table.add_column(name, no_wrap=True)
    for each in EXPERIMENTS.values():
        table.add_row(each.name, each.summary, f"≤ {each.limit_s:g} s", each.breaks, each.needs)
    return table
