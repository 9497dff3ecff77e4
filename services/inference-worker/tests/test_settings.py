import re
from dataclasses import fields
from pathlib import Path

import pytest
from lockstep_common.errors import LockstepError
from lockstep_engine import EngineConfig
from lockstep_worker.quantities import parse_bytes
from lockstep_worker.settings import INTERNAL_OPTIONS, OTHER_NAMES, WorkerSettings
from pydantic import ValidationError

README = Path(__file__).parents[1] / "README.md"


def settings_rows() -> list[str]:
    rows = []
    for name, field in WorkerSettings.model_fields.items():
        default = "required" if field.is_required() else str(field.get_default(call_default_factory=False))
        shown = "-" if default == "None" or field.default_factory else f"`{default.lower()}`"
        shown = "required" if default == "required" else shown
        rows.append(f"| `{name}` | {shown} | {field.description} |")
    return rows


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512Mi", 512 * 2**20),
        ("2Gi", 2**31),
        ("1.5G", 1_500_000_000),
        ("4096", 4096),
        ("1KiB", 1024),
        (" 3M ", 3_000_000),
    ],
)
def test_sizes_are_written_as_in_kubernetes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "Mi", "-1Mi", "1Xi", "1e3", "a lot"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes(text)


def test_flags_come_before_the_environment(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_KV_MEMORY", "1Gi")
    monkeypatch.setenv("LOCKSTEP_TP", "4")
    settings = WorkerSettings.load("worker", ["--model", "m", "--tp", "2", "--worker-id", "w7", "--no-prefix-cache"])
    config = settings.engine_config()
    assert (config.tp, config.kv_memory_bytes, config.label, config.prefix_cache) == (2, 2**30, "w7", False)
    assert config.cuda_graphs
    assert config.overlap is None
    assert WorkerSettings.load("worker", ["--model", "m", "--overlap"]).engine_config().overlap
    assert not WorkerSettings.load("worker", ["--model", "m", "--no-cuda-graphs"]).engine_config().cuda_graphs


def test_the_prefix_cache_in_host_memory_has_a_size_or_none():
    config = WorkerSettings.load("worker", ["--model", "m", "--host-cache-bytes", "1.5Gi"]).engine_config()
    assert config.host_cache_bytes == 3 * 2**29
    assert WorkerSettings.load("worker", ["--model", "m", "--host-cache-bytes", "0"]).engine_config() == EngineConfig(
        model="m", label=config.label
    )
    with pytest.raises(LockstepError, match="host_cache_bytes must be 0 without prefix_cache"):
        WorkerSettings(model="m", host_cache_bytes="1Gi", prefix_cache=False).engine_config()


def test_the_state_server_needs_a_cache_in_host_memory():
    with pytest.raises(ValidationError, match="must be set for a state_server"):
        WorkerSettings(model="m", state_server="state:9100")
    settings = WorkerSettings(model="m", state_server="state:9100", host_cache_bytes="1Gi", state_queue_bytes="64Mi")
    assert (settings.state_server, settings.state_queue_bytes) == ("state:9100", 64 << 20)


def test_kv_compression_reaches_the_engine(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_KV_COMPRESSED_LAYERS", "3,1")
    flags = ["--kv-compression", "per_layer", "--kv-hot-window", "100", "--kv-tenant-share", "0.25"]
    config = WorkerSettings.load("worker", ["--model", "m", *flags]).engine_config()
    assert (config.kv_compression, config.kv_hot_window, config.kv_tenant_share) == ("per_layer", 100, 0.25)
    assert config.kv_compressed_layers == (3, 1)
    config = WorkerSettings.load("worker", ["--model", "m", *flags, "--kv-compressed-layers", "0,2"]).engine_config()
    assert config.kv_compressed_layers == (0, 2)


@pytest.mark.parametrize("option", [field.name for field in fields(EngineConfig)])
def test_every_engine_option_is_a_setting_or_internal(option):
    """Otherwise a new option of the engine could not be set, and no test would fail."""
    setting = OTHER_NAMES.get(option, option)
    assert (setting in WorkerSettings.model_fields) != (option in INTERNAL_OPTIONS)


def test_internal_and_renamed_options_are_options_of_the_engine():
    assert {field.name for field in fields(EngineConfig)} >= INTERNAL_OPTIONS | OTHER_NAMES.keys()


def test_the_defaults_are_the_engines_own():
    """Flags left out change nothing: what the engine is tested with is what a worker runs."""
    assert WorkerSettings(model="m", worker_id="w0").engine_config() == EngineConfig(model="m")


@pytest.mark.parametrize(
    "change",
    [
        {"listen": "9000"},
        {"listen": ":9000"},
        {"listen": "host:99999"},
        {"listen": "unix:relative"},
        {"listen": "unix:/" + "x" * 200},
        {"tp": 0},
        {"management_port": 70000},
        {"status_interval_s": 0},
        {"worker_id": ""},
        {"kv_memory": 0},
        {"host_cache_bytes": "-1"},
        {"host_cache_bytes": "some"},
        {"kv_compression": "some"},
        {"kv_hot_window": 8},
        {"kv_compressed_layers": "one"},
        {"kv_tenant_share": 0},
        {"kv_tenant_share": 1.5},
        {"host_cache_bytes": "1Gi", "state_server": "nowhere"},
        {"host_cache_bytes": "1Gi", "state_server": "host:0"},
        {"host_cache_bytes": "1Gi", "state_server": "host:1", "state_timeout_s": 0},
        {"host_cache_bytes": "1Gi", "state_server": "host:1", "state_queue_bytes": "1Ki"},
        {"host_cache_bytes": "1Gi", "state_server": "host:1", "state_identity": "name"},
        {"unknown": 1},
    ],
)
def test_wrong_values_are_refused(change):
    with pytest.raises(ValidationError):
        WorkerSettings(model="m", **change)


def test_values_that_do_not_go_together_are_refused():
    with pytest.raises(LockstepError, match="max_batch_tokens"):
        WorkerSettings(model="m", max_seqs=64, max_batch_tokens=8).engine_config()
    with pytest.raises(LockstepError, match="kv_compressed_layers must name layers for per_layer"):
        WorkerSettings(model="m", kv_compression="per_layer").engine_config()


def test_the_readme_lists_the_settings_as_they_are():
    rows = [line for line in README.read_text().splitlines() if re.match(r"\| `\w+` \| .* \| .* \|$", line)]
    assert [row for row in rows if row in settings_rows()] == settings_rows(), "\n".join(settings_rows())
