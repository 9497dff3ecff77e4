"""What the collectives' benchmark concludes, and the pieces the benchmarks share."""

import json
import os

import measure
import prediction
import pytest
import torch
from collectives import budget_table, latencies, latency_table, prediction_table, shard_times
from synthetic import SHAPES, write_copier, write_random
from transformers import AutoModelForCausalLM


def test_published_speeds_are_predicted():
    rows = prediction.check()
    assert {row["model"] for row in rows if not row["fitted"]} == {"Llama-3-8B", "Llama-2-70B"}
    assert all(abs(row["error"]) < 0.05 for row in rows)
    assert all(10 < row["latency_us"] < 25 for row in rows)


def test_sizes_of_models_are_known():
    gigabytes = [(each.layer_bytes + each.head_bytes) / 1e9 for each in prediction.MODELS]
    assert gigabytes == pytest.approx([13.2, 15.0, 139], rel=0.01)
    kib = [each.kv_bytes(1) / 1024 for each in prediction.MODELS]
    assert kib == [512, 128, 320]
    assert prediction.LLAMA_3_8B.kv_bytes(16) == prediction.LLAMA_3_8B.kv_bytes(8)  # heads are repeated


def test_a_speed_up_is_what_the_times_say():
    latency = prediction.Latency("10 us", "here", {4: {1: 10.0}}, 2**30)
    model = prediction.LLAMA_2_7B
    row = prediction.predict(model, prediction.H200, latency, 4, measured={1: 4e-3, 4: 1e-3})
    assert row["shard"] == "measured"
    assert row["sums_ms"] == pytest.approx(0.66)
    assert row["speed_up"] == pytest.approx(4 / 1.66, abs=0.01)
    assert row["communication"] == pytest.approx(0.66 / 1.66, abs=0.001)
    assert prediction.predict(model, prediction.H200, latency, 4, measured={4: 1e-3})["shard"] == "computed"


def test_a_budget_is_the_latency_at_which_the_speed_up_is_reached():
    model, device = prediction.LLAMA_3_70B, prediction.H200
    budget = prediction.affordable_us(model, device, 4, 3.4)
    latency = prediction.Latency("as much as may be", "here", {4: {1: budget}}, 2**30)
    assert prediction.predict(model, device, latency, 4)["speed_up"] == pytest.approx(3.4, abs=0.01)


def test_a_latency_is_read_between_its_points():
    latency = prediction.Latency("a", "b", {2: {1024: 10.0, 4096: 20.0}}, 4096)
    assert latency.seconds(2, 8) == latency.seconds(2, 1024) == pytest.approx(10e-6)
    assert latency.seconds(2, 2048) == pytest.approx(15e-6)
    assert latency.seconds(2, 4096) == latency.seconds(2, 10**6) == pytest.approx(20e-6)


def test_predictions_cover_the_models_and_stay_within_what_is_known():
    rows = prediction.predictions()
    assert {(row["model"], row["gpus"]) for row in rows} == {
        (model.name, gpus) for model in prediction.MODELS for gpus in (2, 4, 8)
    }
    assert all(1 < row["speed_up"] < row["gpus"] for row in rows)
    assert not [row for row in rows if row["batch"] == 64 and row["latency"] == "fastest published kernel"]
    assert prediction_table(rows).count("\n") == 1 + len(rows) // 3
    assert budget_table().count("unreachable") >= 3


def test_measured_shards_are_read(tmp_path):
    file = tmp_path / "shards.json"
    file.write_text(
        '[{"model": "Llama-2-7B", "tp": 1, "step_us": 4000}, {"model": "Llama-2-7B", "tp": 4, "step_us": 1300}]'
    )
    assert shard_times(file) == {"Llama-2-7B": {1: 4e-3, 4: pytest.approx(1.3e-3)}}


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="shared memory is for x86")
def test_sums_between_processes_are_timed():
    rows = latencies("shared memory", 2, [8192, 65536])
    assert [row["bytes"] for row in rows] == [8192, 65536]
    assert all(0 < row["median_us"] <= row["p90_us"] for row in rows)
    assert "64 KiB" in latency_table(rows)


def test_a_command_is_as_it_would_be_typed_in_the_repository():
    script = measure.ROOT / "tools/bench/driver.py"
    typed = measure.command([str(script), "--shape", "tiny one"])
    assert typed == ".venv/bin/python tools/bench/driver.py --shape 'tiny one'"


def test_results_are_kept_with_their_command(tmp_path):
    measure.save("some", {"machine": {"cpu": "a", "cores": 2}, "rows": [1]}, "# Some", tmp_path)
    assert json.loads((tmp_path / "some.json").read_text())["command"] == measure.command()
    text = (tmp_path / "some.md").read_text()
    assert text.startswith(f"# Some\n\nMade by `{measure.command()}` on: cpu a, cores 2")
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- some -->\nold\n<!-- end -->\nbelow\n")
    measure.fill(page, "some", measure.table(["a"], [[1], ["b"]]))
    assert page.read_text() == "above\n<!-- some -->\n| a |\n| --- |\n| 1 |\n| b |\n<!-- end -->\nbelow\n"
    with pytest.raises(ValueError, match="no place for other"):
        measure.fill(page, "other", "")


def test_random_checkpoints_load_and_have_the_requested_size(tmp_path):
    shape = SHAPES["tiny"]
    model = AutoModelForCausalLM.from_pretrained(write_random(shape, tmp_path))
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters + norms
    assert 1.1e9 < SHAPES["1b"].parameters < 1.3e9
    assert 0.4e9 < SHAPES["0.5b"].parameters < 1e9


def test_the_copier_copies_what_followed_its_last_three_tokens(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_copier(tmp_path), dtype=torch.float32)
    ids = torch.randint(4, 4096, (400,), generator=torch.Generator().manual_seed(2))
    ids[-12:] = ids[100:112]
    with torch.inference_mode():
        logits = model(ids[None]).logits[0]
    assert logits[-9:].argmax(dim=-1).tolist() == ids[103 + 1 : 112 + 1].tolist()
