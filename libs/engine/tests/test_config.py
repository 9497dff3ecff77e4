"""Engine settings are checked when they are made, and the error names the field and what was given."""

import pytest
from lockstep_common.cpu_limit import usable_cpus
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine.config import RECORDED_TOKENS, EngineConfig, HotWindow
from lockstep_engine.group_settings import group_settings, rank_threads
from specs import model_info


def test_only_the_model_is_required():
    config = EngineConfig(model="somewhere")
    assert (config.tp, config.device, config.prefix_cache) == (1, "auto", True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp", 0),
        ("tp", -2),
        ("device", "gpu"),
        ("dtype", "int8"),
        ("dtype", "fp16"),
        ("collectives", "nccl"),
        ("max_seqs", 0),
        ("max_seqs", 4097),
        ("max_batch_tokens", 63),
        ("max_queue", 0),
        ("max_context", 1),
        ("max_context", 0),
        ("kv_memory_bytes", 0),
        ("kv_memory_bytes", -1),
        ("host_cache_bytes", -1),
        ("threads", 0),
        ("kv_compression", "fp8"),
        ("kv_hot_window", 15),
        ("kv_tenant_share", 0),
        ("kv_tenant_share", 1.5),
    ],
)
def test_bad_values_are_refused(field, value):
    with pytest.raises(LockstepError, match=rf"^{field} .*\(given: {value}\)$") as caught:
        EngineConfig(**{"model": "somewhere", field: value})
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("compression", "layers", "words"),
    [
        ("lazy", (1,), "must name layers for per_layer, and for nothing else"),
        ("per_layer", (), "must name layers for per_layer, and for nothing else"),
        ("per_layer", (-1, 2), "must be different numbers from 0"),
        ("per_layer", (2, 2), "must be different numbers from 0"),
    ],
)
def test_layers_that_do_not_fit_the_compression_are_refused(compression, layers, words):
    with pytest.raises(LockstepError, match=f"^kv_compressed_layers {words}") as caught:
        EngineConfig("somewhere", kv_compression=compression, kv_compressed_layers=layers)
    assert caught.value.field == "kv_compressed_layers"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, HotWindow(sink=1, size=4)),
        ({"kv_hot_window": 16}, HotWindow(sink=1, size=1)),
        ({"kv_hot_window": 65}, HotWindow(sink=1, size=5)),
        ({"kv_compression": "immediate"}, HotWindow(sink=0, size=0)),
        ({"kv_compression": "per_layer", "kv_compressed_layers": (3, 0)}, HotWindow(sink=1, size=4)),
        ({"kv_compression": "none"}, None),
    ],
)
def test_the_hot_window_of_each_compression(fields, expected):
    assert EngineConfig("somewhere", **fields).hot_window == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"max_seqs": 4096, "max_batch_tokens": 4096},
        {"max_seqs": 1, "max_batch_tokens": 1},
        {"max_context": 2},
        {"device": "cpu", "dtype": "bfloat16", "collectives": "torch", "threads": 1},
        {"kv_memory_bytes": 1},
    ],
)
def test_values_at_the_bounds_are_accepted(fields):
    EngineConfig(model="somewhere", **fields)


@pytest.mark.parametrize(
    ("cpus", "tp", "threads"), [(8, 2, 4), (8, 1, 8), (3, 2, 1), (2.5, 1, 2), (0.5, 1, 1), (1, 4, 1), (7.9, 2, 3)]
)
def test_ranks_share_the_cpus_that_the_process_may_use(cpus, tp, threads):
    assert rank_threads(cpus, tp) == threads


@pytest.mark.parametrize(("given", "expected"), [(3, 3), (None, rank_threads(usable_cpus(), 1))])
def test_threads_that_are_set_are_used(given, expected):
    config = EngineConfig(model="m", threads=given)
    settings = group_settings(config, model_info())
    assert settings.spec.threads == expected
    assert settings.environment["OMP_NUM_THREADS"] == str(expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"device": "cpu"}, 512),
        ({"device": "auto"}, 512),
        ({"device": "cuda"}, RECORDED_TOKENS),
        ({"device": "cuda", "max_batch_tokens": 300}, 300),
        ({"device": "cpu", "max_seqs": 600}, 600),
        ({"device": "cuda", "max_seqs": 4096}, 4096),
    ],
)
def test_the_tokens_of_a_step_follow_the_device_unless_they_are_set(settings, expected):
    assert EngineConfig(model="m", **settings).step_tokens == expected
