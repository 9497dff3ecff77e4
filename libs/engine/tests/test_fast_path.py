"""Slow paths on a GPU: refused with the reason, unless a setting allows them."""

import logging
import subprocess
from types import SimpleNamespace

import pytest
import torch
from lockstep_common.errors import LockstepError
from lockstep_engine import distributed, fast_path
from lockstep_engine.config import EngineConfig
from lockstep_engine.control import RankSpec
from lockstep_engine.graphs import GraphedStep
from lockstep_engine.kernels import gpu, prebuilt, tiles
from lockstep_engine.rank import Rank
from lockstep_engine.recorders import HostRecorder, NotRecordableError
from lockstep_engine.step_recorder import StepRecorder
from specs import model_info

CUDA = torch.device("cuda")


def config(**settings):
    return EngineConfig(model="", **settings)


@pytest.mark.parametrize("missing", [fast_path.without_kernels, fast_path.without_graphs])
def test_a_slow_path_is_an_error_on_a_gpu_that_was_asked_for(missing, caplog):
    caplog.set_level(logging.WARNING, logger="lockstep.engine")
    for value in ("required", "prebuilt"):
        with pytest.raises(LockstepError, match=f"fast_path is {value}, but .*: no room") as error:
            missing(config(device="cuda", fast_path=value), "no room")
        assert error.value.field == "fast_path"
    assert not caplog.records
    missing(config(device="cuda", fast_path="preferred"), "no room")
    missing(config(device="auto"), "no room")
    assert [record.getMessage().endswith(": no room") for record in caplog.records] == [True, True]


def test_ranks_do_without_kernels_if_one_of_them_has_to():
    asked = []

    def others(reason):
        asked.append(reason)
        return [reason, "out of shared memory", "no room"]

    assert fast_path.common_reason(others, None) == "rank 1: out of shared memory"
    assert fast_path.common_reason(others, "no compiler") == "rank 0: no compiler"
    assert asked == ["", "no compiler"]
    assert fast_path.common_reason(lambda reason: [reason] * 2, None) is None
    assert fast_path.common_reason(lambda reason: [reason], "no compiler") == "no compiler"


class GpuRank(Rank):
    """Only what decides whether kernels compute."""

    def __init__(self, group, settings):
        text = SimpleNamespace(num_attention_heads=8)
        module = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
        self._device, self._dtype, self._group, self._deterministic = CUDA, torch.bfloat16, group, False
        self._spec = RankSpec(rank=0, epoch=0, config=settings, model=model_info(), threads=1)
        self.model = SimpleNamespace(head_dim=128, latent=0, kv_heads=2, module=module)


class SecondOfTwo:
    """The group of a rank that has the kernels, whose neighbour has not."""

    size = 2

    def all_gather(self, mine):
        assert not mine.any()
        other = torch.zeros_like(mine)
        other[:7] = torch.tensor(list(b"no room"), dtype=torch.uint8)
        return torch.cat([other, mine])


def test_a_rank_gives_its_kernels_up_with_its_neighbour(monkeypatch):
    monkeypatch.setattr(gpu, "GIVEN_UP", [])
    monkeypatch.setattr(gpu, "build_problem", lambda: None)
    monkeypatch.setattr(gpu, "try_attention", lambda *_, **__: None)
    assert GpuRank(distributed.Alone(), config(device="cuda"))._by_kernels()
    with pytest.raises(LockstepError, match=r"fast_path is required, but .*: rank 0: no room"):
        GpuRank(SecondOfTwo(), config(device="cuda", tp=2))._by_kernels()
    monkeypatch.setattr(gpu, "GIVEN_UP", [])
    assert not GpuRank(SecondOfTwo(), config(device="cuda", tp=2, fast_path="preferred"))._by_kernels()


def test_a_kernel_that_is_not_prebuilt_is_told_or_refused(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="lockstep.engine")
    monkeypatch.setattr(prebuilt, "MISSES", prebuilt.Misses())
    monkeypatch.delenv(prebuilt.FOLDER_VARIABLE, raising=False)
    fast_path.check_prebuilt(config())
    with pytest.raises(LockstepError, match="names no folder"):
        fast_path.check_prebuilt(config(fast_path="prebuilt"))
    monkeypatch.setenv(prebuilt.FOLDER_VARIABLE, str(tmp_path))
    fast_path.check_prebuilt(config(fast_path="prebuilt"))
    assert not caplog.records
    prebuilt.MISSES.add("_attend")
    fast_path.check_prebuilt(config())
    assert "1 kernels were compiled at this start" in caplog.text
    with pytest.raises(LockstepError, match="1 kernels are not, for this model and GPU: _attend"):
        fast_path.check_prebuilt(config(fast_path="prebuilt"))


def test_an_unknown_value_is_refused():
    with pytest.raises(LockstepError, match="fast_path must be required, prebuilt or preferred"):
        config(fast_path="always")


def test_kernels_of_the_exact_mode_are_never_prebuilt():
    with pytest.raises(LockstepError, match="fast_path cannot be prebuilt with deterministic"):
        config(device="cuda", fast_path="prebuilt", deterministic=True)
    config(device="cuda", fast_path="required", deterministic=True)
    config(device="cuda", fast_path="prebuilt")


class OutOfResources(Exception):
    """As Triton's: no RuntimeError."""


FAILURES = [
    OutOfResources("out of resource: shared memory\nmore"),
    subprocess.CalledProcessError(1, ["gcc"]),
    AssertionError("libcuda.so cannot found!"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: type(each).__name__)
def test_what_triton_raises_ends_a_recording_with_its_reason(failure):
    def body(inputs):
        raise failure

    for act in (GraphedStep.capture, GraphedStep.estimate_bytes):
        graphs = GraphedStep(body, 2, 1, torch.device("cpu"), HostRecorder())
        with pytest.raises(NotRecordableError, match=f"^{type(failure).__name__}: ") as error:
            act(graphs)
        assert "\n" not in str(error.value)


def rank_that_records(body):
    """A rank on a GPU that must be fast, with one sequence."""
    spec = SimpleNamespace(config=config(device="cuda", max_seqs=1), model=SimpleNamespace(context_length=16))
    return StepRecorder(spec, torch.device("cpu"), lambda cache, inputs: body(), lambda said: [said], records=True)


def test_a_recording_without_memory_does_not_refuse_the_start():
    def body():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError), gpu.refusing_failures(0):
        rank_that_records(body).record(None)


def test_a_recording_that_needs_the_host_refuses_the_start():
    with pytest.raises(LockstepError, match=r"decode steps run without CUDA graphs: RuntimeError: .*needs the host"):
        rank_that_records(lambda: torch.ones(1).nonzero()).record(None)


def test_an_error_of_ours_is_not_taken_for_one_of_the_device():
    def body(inputs):
        raise LockstepError("INVALID_REQUEST", "no such layer")

    with pytest.raises(LockstepError, match="no such layer"):
        GraphedStep(body, 2, 1, torch.device("cpu"), HostRecorder()).estimate_bytes()


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: type(each).__name__)
def test_a_kernel_that_cannot_be_loaded_is_given_up_once_with_its_reason(failure, monkeypatch):
    class Launches:
        @staticmethod
        def attention_calls(*_, **__):
            raise failure

    monkeypatch.setattr(gpu, "GIVEN_UP", [])
    monkeypatch.setattr(gpu, "build_problem", lambda: None)
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: Launches)
    monkeypatch.setattr(prebuilt, "activate", lambda: None)
    form = CUDA, torch.bfloat16, 128
    assert gpu.problem(*form) is None
    gpu.try_attention(*form, 4, compressed=True)
    gpu.try_attention(*form, 4, compressed=True)
    assert gpu.problem(*form).startswith(f"kernel Triton cannot run: {type(failure).__name__}: ")
    assert not gpu.usable(*form)
    assert len(gpu.GIVEN_UP) == 1


@pytest.mark.parametrize(
    "failure",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: unspecified launch failure")],
    ids=lambda each: type(each).__name__,
)
def test_a_kernel_is_not_given_up_because_memory_or_the_device_failed(failure, monkeypatch):
    class Launches:
        @staticmethod
        def attention_calls(*_, **__):
            raise failure

    monkeypatch.setattr(gpu, "GIVEN_UP", [])
    monkeypatch.setattr(gpu, "build_problem", lambda: None)
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: Launches)
    monkeypatch.setattr(prebuilt, "activate", lambda: None)
    with pytest.raises(type(failure)) as ended:
        gpu.try_attention(CUDA, torch.bfloat16, 128, 4, compressed=True)
    assert ended.value is failure
    assert not gpu.GIVEN_UP


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_every_form_of_attention_that_serves_is_launched_first(exact, windowed, monkeypatch):
    asked = []

    class Launches:
        @staticmethod
        def attention_calls(per_head, head_dim, dtype, **form):
            asked.append((per_head, head_dim, dtype, *form.values()))
            return []

    monkeypatch.setattr(gpu, "GIVEN_UP", [])
    monkeypatch.setattr(gpu, "build_problem", lambda: None)
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: Launches)
    monkeypatch.setattr(prebuilt, "activate", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    gpu.try_attention(CUDA, torch.float16, 64, 4, compressed=True, windowed=windowed, exact=exact)
    expected = [(4, 64, torch.float16, True, window, exact, 0) for window in ((False, True) if windowed else (False,))]
    assert asked == expected


@pytest.mark.parametrize(
    "failure", [*FAILURES, RuntimeError("Triton Error [CUDA]: device kernel image is invalid")], ids=str
)
def test_a_kernel_that_fails_at_the_start_refuses_it_for_good(failure):
    with pytest.raises(LockstepError) as refused, gpu.refusing_failures(3):
        raise failure
    said = f"rank 3: the GPU's kernels cannot serve this model: {type(failure).__name__}: "
    assert refused.value.message.startswith(said)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        ConnectionResetError(),
        LockstepError("INVALID_REQUEST", "no such layer"),
    ],
    ids=str,
)
def test_other_failures_of_a_start_stay_what_they_are(failure):
    with pytest.raises(type(failure)) as ended, gpu.refusing_failures(3):
        raise failure
    assert ended.value is failure


def test_where_kernels_do_not_serve_nothing_is_taken_for_their_failure():
    with pytest.raises(AssertionError), gpu.refusing_failures(3, used=False):
        raise AssertionError


def test_tiles_fit_what_a_gpu_has():
    small, large = (tiles.LIMITS[arch].shared_bytes for arch in (86, 90))
    assert tiles.shape_for(128, 128, torch.bfloat16, small).keys < tiles.shape_for(128, 128, torch.bfloat16, large).keys
    assert tiles.shape_for(256, 16, torch.bfloat16, small).keys < tiles.shape_for(256, 16, torch.bfloat16, large).keys
    assert tiles.limits_of(87, 166_912).shared_bytes == tiles.LIMITS[86].shared_bytes
    assert tiles.limits_of(120, 101_376).shared_bytes == 101_376
    assert tiles.limits_of(103, 232_448) is tiles.LIMITS[100]
    assert tiles.limits_of(75, 65_536) is tiles.LIMITS[86]


def test_splits_follow_batch_and_context():
    programs = 4 * 132
    assert tiles.splits_for(1, 8, 131072, programs) == 64
    assert tiles.splits_for(8, 8, 131072, programs) == 8
    assert tiles.splits_for(1, 8, 512, programs) == 4
    assert tiles.splits_for(1, 8, 16, programs) == 1
    assert tiles.splits_for(512, 8, 131072, programs) == 1
