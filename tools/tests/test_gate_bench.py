"""The cost gate with a real engine, a real state server and a network of known speed: a sample of `gate.py`."""

import math

import pytest
from gate import COMPUTED, FETCHED, Network, measure_model, text_of
from measure import ROOT

FAST, SLOW = Network(math.inf, 0.0), Network(2.0, 60.0)
SHORT, LONG = 64, 1024


@pytest.mark.slow
async def test_the_gate_takes_the_way_that_is_clearly_faster() -> None:
    # A pause of the machine must not make the store unavailable, which the gate would take for a reason to compute.
    networks, lengths = [SLOW, FAST], (SHORT, LONG)
    cases = await measure_model("reference", ROOT / "models/reference", networks, lengths, 3, timeout_s=10.0)
    print(text_of(cases))
    clear = [case for case in cases if not 0.5 < case.median(FETCHED) / case.median(COMPUTED) < 2]
    assert all(case.chosen == case.faster for case in clear if case.faster), text_of(cases)
    found = {(case.network, case.tokens): case.chosen for case in cases}
    assert found[SLOW, SHORT] == COMPUTED
    assert found[FAST, LONG] == FETCHED
