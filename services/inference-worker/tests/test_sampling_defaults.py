"""The model card has the sampling settings of the model's generation_config.json."""

import json
import re

import pytest
from harness import make_settings, served
from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_worker.sampling_defaults import load_sampling_defaults


def defaults_of(directory, values):
    (directory / "generation_config.json").write_text(json.dumps(values))
    return load_sampling_defaults(directory)


def test_every_setting_is_taken(tmp_path):
    values = {"temperature": 0.5, "top_p": 0.25, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.5}
    others = {"do_sample": False, "max_new_tokens": 7, "max_length": 8, "eos_token_id": 3, "transformers_version": "5"}
    assert defaults_of(tmp_path, values | others) == inference_pb2.Sampling(**values)


@pytest.mark.parametrize("values", [{}, {"temperature": None, "top_k": None, "eos_token_id": [1, 2]}])
def test_settings_that_are_not_there_stay_unset(tmp_path, values):
    assert defaults_of(tmp_path, values) == inference_pb2.Sampling()


def test_no_file_sets_nothing(tmp_path):
    assert load_sampling_defaults(tmp_path) == inference_pb2.Sampling()


def test_values_that_switch_a_filter_off_are_settings(tmp_path):
    defaults = defaults_of(tmp_path, {"top_k": -1, "temperature": 0, "top_p": 1})
    assert defaults.HasField("top_k")
    assert (defaults.top_k, defaults.temperature, defaults.top_p) == (0, 0.0, 1.0)


UNUSABLE = [
    ("temperature", "warm"),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_k", 2**31),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", float("inf")),
    ("repetition_penalty", [1.0]),
]


@pytest.mark.parametrize(("field", "value"), UNUSABLE)
def test_unusable_values_are_named(tmp_path, field, value):
    with pytest.raises(LockstepError, match=rf"generation_config.json has no usable {field}") as refused:
        defaults_of(tmp_path, {field: value})
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert "`generation_config` = `none`" in refused.value.message


@pytest.mark.parametrize("content", ["", "[1]", '"x"', "{", "[" * 100_000])
def test_unusable_files_are_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(LockstepError, match=re.escape(str(tmp_path))):
        load_sampling_defaults(tmp_path)


async def test_the_card_has_them_unless_they_are_turned_off(model_dir, socket_path):
    (model_dir / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 20}')
    async with served(make_settings(model_dir, socket_path)) as worker:
        card = (await worker.router().greet()).model
        assert card.default_sampling == inference_pb2.Sampling(temperature=0.5, top_k=20)
    off = make_settings(model_dir, f"{socket_path}2", generation_config="none")
    async with served(off) as worker:
        assert not (await worker.router().greet()).model.default_sampling.ListFields()
