"""Kernels are built while weights are read: all forms that a plain model launches. No failure ends a start."""

import threading

import packers
import pytest
import torch
from checkpoints import make
from lockstep_engine.config import EngineConfig
from lockstep_engine.distributed import Alone
from lockstep_engine.gpu_calls import plain_calls
from lockstep_engine.kernels.ahead import Ahead
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.weights import load_weights
from test_integer_weights import W4, twin
from triton.runtime.cache import triton_key
from triton_device import DEVICE

CPU = torch.device("cpu")


class Call:
    kernel = "k"

    def __init__(self, log, error=None):
        self.log, self.error = log, error

    def launch(self, device):
        self.log.append((device, threading.current_thread()))
        if self.error:
            raise self.error


def test_each_call_is_launched_once_in_another_thread():
    log = []
    Ahead([Call(log) for _ in range(20)], CPU, 3).wait()
    assert [device for device, _ in log] == [CPU] * 20
    assert threading.current_thread() not in {thread for _, thread in log}
    Ahead([], CPU, 3).wait()


def test_one_that_fails_keeps_no_other_from_being_built():
    log = []
    Ahead([Call(log, RuntimeError("no")) for _ in range(3)], CPU, 3).wait()
    assert len(log) == 3


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["qwen3", pytest.param("llama", marks=pytest.mark.slow), pytest.param("qwen2", marks=pytest.mark.slow)]
)
def test_what_a_plain_model_launches_is_known_before_its_weights_are_there(tmp_path, name, exact):
    model = build_model(inspect_model(EngineConfig(model=str(make(name, tmp_path)[0]))), Alone(), torch.float32)
    calls = plain_calls(model.module, model.hidden_act, torch.float32, exact=exact, compressed=True)
    kernels = {call.kernel for call in calls}
    expected = {"attend_exact", "linear"} if exact else {"attend", "product"}
    assert kernels == expected | {"choose", "clock", "compress", "add_rms_norm", "silu_mul", "rotate_store"}
    assert len(calls) == len(set(calls))
    for call in calls:
        if call.kernel != "clock":  # Triton's interpreter has none
            call.launch(DEVICE)


def test_weights_that_stay_codes_have_launches_of_their_own(tmp_path):
    info = inspect_model(EngineConfig(model=str(twin(tmp_path, "llama", W4, packers.packed)[0])))
    model, calls = build_model(info, Alone(), torch.float32), []

    def note():
        calls.extend(plain_calls(model.module, model.hidden_act, torch.float32, exact=True, compressed=False))

    load_weights(model.module, info, DEVICE, codes_on_gpu=True, on_formed=note)
    assert sum(call.kernel == "linear" for call in calls) == 1  # of the head
    coded = [call for call in calls if call.kernel == "coded"]
    assert {str(call.arguments[3]) for call in coded} == {"4 bits, groups of 32", "4 bits, groups of 32, zeros"}
    for call in coded:
        call.launch(DEVICE)


def test_other_models_are_not_known(tmp_path):
    model = build_model(inspect_model(EngineConfig(model=str(make("gpt2", tmp_path)[0]))), Alone(), torch.float32)
    assert plain_calls(model.module, model.hidden_act, torch.float32, exact=False, compressed=True) == []


def test_triton_keeps_the_hash_that_the_zygote_has_it_make():
    assert triton_key.cache_info().maxsize
