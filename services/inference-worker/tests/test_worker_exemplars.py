"""The worker's histograms of a request's time name its trace, if the router's decision or the worker's own keeps it."""

from pathlib import Path

import pytest
from harness import make_settings, served, submit, until
from lockstep_common.telemetry import OPENMETRICS, exposition_for
from lockstep_common.trace_context import TraceContext
from lockstep_engine import Phase
from prometheus_client.openmetrics.parser import text_string_to_metric_families

HISTOGRAMS = {f"lockstep_worker_{name}_seconds" for name in ("queue", "prefill", "decode")}


def examples(trace_id: int) -> set[str]:
    """The histograms that have the trace as an example."""
    text = exposition_for(OPENMETRICS)[0].decode()
    return {
        family.name
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": f"{trace_id:032x}"}
    }


@pytest.mark.parametrize(
    ("trace_id", "is_sampled", "exporter", "slow_s", "expected"),
    [
        pytest.param(0x5E1, True, "memory", 60.0, HISTOGRAMS, id="the router keeps it"),
        pytest.param(0x5E2, False, "memory", 60.0, set(), id="nobody keeps it"),
        pytest.param(0x5E3, True, "none", 60.0, set(), id="the worker makes no traces"),
        pytest.param(0x5E4, False, "memory", 1e-9, HISTOGRAMS, id="the worker keeps it because it is slow"),
    ],
)
async def test_only_a_trace_that_is_kept_is_an_example_of_a_worker(
    model_dir: Path,
    socket_path: str,
    monkeypatch: pytest.MonkeyPatch,
    trace_id: int,
    is_sampled: bool,
    exporter: str,
    slow_s: float,
    expected: set[str],
):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    async with served(make_settings(model_dir, socket_path, trace_slow_s=slow_s)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit(max_tokens=2, traceparent=TraceContext(trace_id, 0xB, is_sampled).traceparent))
        await until(lambda: worker.engine.requests)
        (request_id,) = worker.engine.requests
        worker.engine.change_phase(request_id, Phase.RUNNING)
        await router.next("phases")
        worker.engine.step()
        worker.engine.step()
        await until(lambda: not worker.engine.requests)
    assert examples(trace_id) == expected
