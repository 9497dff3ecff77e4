"""A model directory is read correctly, or refused with one sentence that names the cause."""

import json
import os
import pickle

import pytest
from handmade import safetensors_bytes, write_model
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine.config import EngineConfig, SlidingWindow, WindowedLayers
from lockstep_engine.model_config import inspect_model


def inspect(path, **settings):
    return inspect_model(EngineConfig(model=str(path), **settings))


def refusal(path, **settings):
    """The sentence with which a model is refused."""
    with pytest.raises(LockstepError) as caught:
        inspect(path, **settings)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.field == "model"
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def short(value):
    """The name of a case."""
    return repr(value)[:12]


class Trap:
    """Its pickle makes a directory when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class TestContents:
    def test_a_complete_directory(self, tmp_path):
        path = write_model(tmp_path / "tiny", files=["b.safetensors", "a.safetensors"])
        info = inspect(path)
        assert (info.path, info.name, info.architecture, info.dtype) == (path, "tiny", "LlamaForCausalLM", "bfloat16")
        assert (info.vocab_size, info.hidden_size, info.context_length, info.eos_ids) == (100, 64, 128, (1,))
        assert info.weight_files == ("a.safetensors", "b.safetensors")
        assert info.created == int((path / "config.json").stat().st_mtime)

    @pytest.mark.parametrize(("limit", "expected"), [(None, 128), (64, 64), (1000, 128)])
    def test_the_context_is_the_smaller_of_the_models_and_the_users(self, tmp_path, limit, expected):
        assert inspect(write_model(tmp_path), max_context=limit).context_length == expected

    @pytest.mark.parametrize(
        ("model_type", "changes", "expected"),
        [
            ("mistral", {}, 80),
            ("mistral", {"sliding_window": None}, None),
            ("mistral", {"sliding_window": 127}, 127),
            ("mistral", {"sliding_window": 128}, None),  # the whole context
            ("mistral", {"layer_types": ["sliding_attention"] * 2}, 80),
            ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, None),
            ("phi3", {"sliding_window": 0}, None),
            ("phi3", {"sliding_window": "80"}, None),
            ("llama", {}, None),  # has none, whatever the field says
            ("gemma2", {"layer_types": ["sliding_attention"] * 2}, None),  # not known
            ("qwen2", {"max_window_layers": 0}, None),
            ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 80),
            ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, None),
            ("qwen2", {"use_sliding_window": True}, None),
            ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 80),
            ("qwen3_moe", {"use_sliding_window": True}, 80),
            ("qwen3_moe", {}, None),
        ],
        ids=short,
    )
    def test_the_window_that_every_layer_has(self, tmp_path, model_type, changes, expected):
        path = write_model(tmp_path, model_type=model_type, **{"sliding_window": 80, **changes})
        assert inspect(path).window == (None if expected is None else SlidingWindow(expected))

    @pytest.mark.parametrize(
        ("settings", "is_used"),
        [
            ({}, True),
            ({"kv_compression": "none"}, True),
            ({"kv_compression": "immediate"}, True),
            ({"kv_hot_window": 80}, False),
            ({"kv_hot_window": 128}, False),
            ({"max_context": 80}, False),
            ({"max_context": 81}, True),
        ],
        ids=str,
    )
    def test_a_window_is_used_where_it_saves_blocks(self, tmp_path, settings, is_used):
        """Those that are compressed lie before the hot window."""
        path = write_model(tmp_path, model_type="mistral", sliding_window=80)
        assert (inspect(path, **settings).window == SlidingWindow(80)) == is_used

    @pytest.mark.parametrize(
        ("model_type", "changes", "expected"),
        [
            ("gemma2", {}, (0, 2)),
            ("gemma3_text", {}, None),  # the first without a window would be the sixth
            ("gemma3_text", {"num_hidden_layers": 7}, (0, 1, 2, 3, 4, 6)),
            ("gemma3_text", {"sliding_window_pattern": 3}, (0, 1, 3)),
            ("cohere2", {}, (0, 1, 2)),
            (
                "cohere2",
                {"sliding_window_pattern": 2, "layer_types": [*["full_attention"] * 3, "sliding_attention"]},
                (3,),
            ),
            ("exaone4", {"sliding_window_pattern": "LLLG"}, None),
            ("gpt_oss", {"layer_types": ["full_attention", *["sliding_attention"] * 3]}, (1, 2, 3)),
            ("gpt_oss", {"layer_types": ["sliding_attention"]}, None),  # says nothing of the others
            ("gpt_oss", {"layer_types": ["full_attention"] * 4}, None),
            ("gpt_oss", {"sliding_window": None}, None),
            ("mellum", {}, None),
            ("mellum", {"layer_types": ["sliding_attention", "full_attention"] * 2}, (0, 2)),
            ("qwen2", {"max_window_layers": 3}, None),
            ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, (3,)),
            ("qwen3", {"use_sliding_window": True, "max_window_layers": 9}, None),
            ("llama", {"layer_types": ["sliding_attention", "full_attention"] * 2}, None),  # has none
        ],
        ids=short,
    )
    def test_the_layers_that_have_a_window(self, tmp_path, model_type, changes, expected):
        fields = {"num_hidden_layers": 4, "sliding_window": 16, **changes}
        found = inspect(write_model(tmp_path, model_type=model_type, **fields)).windowed
        layers = fields["num_hidden_layers"]
        assert found == (None if expected is None else WindowedLayers(SlidingWindow(16), expected, layers))

    @pytest.mark.parametrize(
        ("settings", "is_used"),
        [
            ({}, True),
            ({"kv_compression": "none"}, True),
            ({"kv_compression": "immediate"}, False),
            ({"kv_compression": "per_layer", "kv_compressed_layers": (0,)}, False),
            ({"kv_hot_window": 80}, True),
            ({"max_context": 128}, True),
            ({"max_context": 127}, False),
        ],
        ids=str,
    )
    def test_layers_with_a_window_give_it_back_in_contexts_of_many(self, tmp_path, settings, is_used):
        path = write_model(tmp_path, model_type="gpt_oss", num_hidden_layers=2, sliding_window=16)
        assert (inspect(path, **settings).windowed is not None) == is_used

    def test_the_digest_tells_engines_apart_that_see_other_blocks_compressed(self, tmp_path):
        path = write_model(tmp_path, model_type="gpt_oss", num_hidden_layers=2, sliding_window=16)
        lazy, none = (
            [inspect(path, kv_compression=kind, max_context=context).digest for context in (127, 128)]
            for kind in ("lazy", "none")
        )
        assert lazy[0] != lazy[1]
        assert none[0] == none[1] not in lazy

    @pytest.mark.parametrize(
        ("rope", "expected"),
        [
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}, 384),  # Qwen 3
            ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),  # DeepSeek: included
            ({"rope_type": "yarn", "factor": 2.5}, 320),
            ({"type": "linear", "factor": 8}, 1024),
            ({"type": "dynamic", "factor": 2.0}, 256),
            ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 128),
            ({"rope_type": "longrope", "factor": 8.0}, 128),
            ({"rope_type": "default"}, 128),
            ({"full_attention": {"rope_type": "linear", "factor": 8.0}}, 128),  # Gemma 3
        ],
    )
    @pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
    def test_rotary_scaling_extends_the_context(self, tmp_path, field, rope, expected):
        assert inspect(write_model(tmp_path, **{field: rope})).context_length == expected

    @pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
    def test_a_context_that_includes_the_scaling_is_not_extended(self, tmp_path, field):
        rope = {"rope_type": "linear", "factor": 8.0}
        path = write_model(tmp_path, model_type="gemma3_text", max_position_embeddings=131072, **{field: rope})
        assert inspect(path).context_length == 131072

    @pytest.mark.parametrize("kind", ["su", "yarn"])
    def test_older_names_of_longrope_do_not_extend_the_context(self, tmp_path, kind):
        rope = {"type": kind, "original_max_position_embeddings": 64}
        path = write_model(tmp_path, model_type="phi3", original_max_position_embeddings=64, rope_scaling=rope)
        assert inspect(path).context_length == 128

    def test_the_users_limit_holds_for_an_extended_context(self, tmp_path):
        path = write_model(tmp_path, rope_scaling={"type": "linear", "factor": 8})
        assert inspect(path, max_context=500).context_length == 500

    @pytest.mark.parametrize("factor", [None, 0.5, "4", True, float("nan"), float("inf"), 1e308, 10**400], ids=short)
    def test_a_scaling_without_a_usable_factor(self, tmp_path, factor):
        path = write_model(tmp_path, rope_scaling={"type": "yarn", "factor": factor})
        assert "factor for its yarn rotary scaling" in refusal(path)

    @pytest.mark.parametrize("original", ["4", True, -1, 1e308, 10**400], ids=short)
    def test_a_scaling_of_an_unusable_context(self, tmp_path, original):
        rope = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": original}
        assert "no usable original_max_position_embeddings" in refusal(write_model(tmp_path, rope_scaling=rope))

    @pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
    def test_a_scaling_to_more_positions_than_32_bits_count(self, tmp_path, kind):
        rope = {"type": kind, "factor": 2.0**16, "original_max_position_embeddings": 2**16}
        assert f"{kind} rotary scaling to {2**32} positions" in refusal(write_model(tmp_path, rope_scaling=rope))

    @pytest.mark.parametrize(("dtype", "expected"), [("BF16", "bfloat16"), ("F16", "float16"), ("I8", "float32")])
    def test_the_dtype_is_that_of_the_weights_where_the_config_is_silent(self, tmp_path, dtype, expected):
        path = write_model(tmp_path, dtype=None, torch_dtype=None)
        (path / "model.safetensors").write_bytes(safetensors_bytes(dtype=dtype))
        assert inspect(path).dtype == expected

    def test_a_name_can_be_given(self, tmp_path):
        assert inspect(write_model(tmp_path), name="served").name == "served"

    @pytest.mark.parametrize(
        ("config", "generation", "expected"),
        [
            (1, None, (1,)),
            ([1, 2], None, (1, 2)),
            (None, None, ()),
            (1, {"eos_token_id": [3, 4]}, (3, 4)),
            (1, {"eos_token_id": 5}, (5,)),
            (1, {}, (1,)),
        ],
    )
    def test_end_of_text_ids(self, tmp_path, config, generation, expected):
        path = write_model(tmp_path, eos_token_id=config)
        if generation is not None:
            (path / "generation_config.json").write_text(json.dumps(generation))
        assert inspect(path).eos_ids == expected

    @pytest.mark.parametrize("form", ["added", "vocabulary", "unigram", "settings"])
    @pytest.mark.parametrize("as_object", [False, True])
    def test_the_end_token_of_the_tokenizer_ends_answers_too(self, tmp_path, form, as_object):
        path = write_model(tmp_path, eos_token_id=1)
        digest = inspect(path).digest
        tokenizer = {
            "added": {"added_tokens": [{"id": 3, "content": "<a>"}, {"id": 7, "content": "<end>"}]},
            "vocabulary": {"added_tokens": [], "model": {"vocab": {"<a>": 3, "<end>": 7}}},
            "unigram": {"model": {"vocab": [*([f"t{number}", -1.0] for number in range(7)), ["<end>", 0.0]]}},
            "settings": {},
        }[form]
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        settings = {"eos_token": {"content": "<end>", "lstrip": False} if as_object else "<end>"}
        if form == "settings":
            settings["added_tokens_decoder"] = {"3": {"content": "<a>"}, "7": {"content": "<end>"}}
        before = inspect(path)
        assert before.eos_ids == (1,)
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert inspect(path).eos_ids == (1, 7)
        assert inspect(path).digest not in (digest, before.digest), "answers end elsewhere"
        (path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
        known = inspect(path)
        (path / "tokenizer_config.json").unlink()
        assert (inspect(path).eos_ids, inspect(path).digest) == (known.eos_ids, known.digest) == ((7, 1), known.digest)

    @pytest.mark.parametrize(
        ("settings", "tokenizer"),
        [
            ({}, {}),
            ({"eos_token": None}, {}),
            ({"eos_token": "<end>"}, None),
            ({"eos_token": "<end>"}, {"added_tokens": None, "model": 3}),
            ({"eos_token": "<end>"}, {"added_tokens": [3, {"content": "<end>"}], "model": {"vocab": {"<end>": "7"}}}),
            ({"eos_token": {"content": 7}}, {}),
            ({"eos_token": "<end>", "added_tokens_decoder": {"x": {"content": "<end>"}, "7": 3}}, {}),
            ({"eos_token": "<end>"}, {"added_tokens": [{"id": 100, "content": "<end>"}]}),
        ],
    )
    def test_a_tokenizer_may_name_no_end_token_that_the_model_has(self, tmp_path, settings, tokenizer):
        path = write_model(tmp_path, eos_token_id=1)
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        (path / "tokenizer.json").unlink(missing_ok=True)
        if tokenizer is not None:
            (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert inspect(path).eos_ids == (1,)

    def test_end_of_text_ids_outside_the_vocabulary_are_left_out(self, tmp_path):
        assert inspect(write_model(tmp_path, eos_token_id=[1, 100, -1])).eos_ids == (1,)

    def test_the_index_names_the_files(self, tmp_path):
        path = write_model(tmp_path, files=["one.safetensors", "two.safetensors", "stray.safetensors"])
        write_index(path, {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
        assert inspect(path).weight_files == ("one.safetensors", "two.safetensors")


def write_index(path, weight_map):
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


class TestRefusals:
    def test_no_directory(self, tmp_path):
        assert "no such directory" in refusal(tmp_path / "absent")
        (tmp_path / "file").write_text("")
        assert "no such directory" in refusal(tmp_path / "file")
        (tmp_path / "model.gguf").touch()
        assert "`lockstep convert` makes a directory of it" in refusal(tmp_path / "model.gguf")

    def test_no_config(self, tmp_path):
        (write_model(tmp_path) / "config.json").unlink()
        assert "config.json is missing" in refusal(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"{", b"[1", b"\xff\xfe", b'{"vocab_size": 1,}'])
    def test_a_broken_config(self, tmp_path, content):
        (write_model(tmp_path) / "config.json").write_bytes(content)
        assert "config.json cannot be read" in refusal(tmp_path)

    @pytest.mark.parametrize("content", ["[]", "null", "3", '"text"'])
    def test_a_config_that_is_no_object(self, tmp_path, content):
        (write_model(tmp_path) / "config.json").write_text(content)
        assert "config.json is not a JSON object" in refusal(tmp_path)

    def test_a_config_that_is_a_directory(self, tmp_path):
        (write_model(tmp_path) / "config.json").unlink()
        (tmp_path / "config.json").mkdir()
        assert "config.json cannot be read" in refusal(tmp_path)

    @pytest.mark.parametrize(
        ("architectures", "named"),
        [
            (["BertModel"], "BertModel"),
            (["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
            ([], "None"),
            (None, "None"),
            ([3], "3"),
        ],
    )
    def test_an_architecture_that_generates_no_text(self, tmp_path, architectures, named):
        message = refusal(write_model(tmp_path, architectures=architectures))
        assert f"architecture {named}" in message
        assert "ForCausalLM" in message

    @pytest.mark.parametrize("architectures", ["LlamaForCausalLM", 5, {"a": 1}, True])
    def test_architectures_that_are_no_list(self, tmp_path, architectures):
        assert "architecture" in refusal(write_model(tmp_path, architectures=architectures))

    @pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "max_position_embeddings"])
    @pytest.mark.parametrize("value", [None, 0, -1, "100", 1.5, [100], 2**31, 10**400], ids=short)
    def test_a_size_that_is_missing_or_no_number(self, tmp_path, field, value):
        message = refusal(write_model(tmp_path, **{field: value}))
        assert f"no usable {field} (given: {value})" in message

    @pytest.mark.parametrize(
        ("field", "value"), [("is_causal", False), ("is_causal", 0), ("use_bidirectional_attention", True)]
    )
    def test_attention_to_later_tokens(self, tmp_path, field, value):
        message = refusal(write_model(tmp_path, **{field: value}))
        assert "attends to later tokens, which is not supported" in message
        assert f"({field} in config.json is {json.dumps(value)})" in message
        inspect(write_model(tmp_path, **{field: not value}))

    def test_a_rotary_scaling_by_an_older_name_that_is_not_read(self, tmp_path):
        path = write_model(
            tmp_path, model_type="phi3", original_max_position_embeddings=64, rope_scaling={"type": "su"}
        )
        assert "change su to longrope" in refusal(path)
        inspect(
            write_model(path, model_type="phi3", original_max_position_embeddings=64, rope_scaling={"type": "longrope"})
        )

    @pytest.mark.parametrize("beside", [True, False])
    def test_an_adapter(self, tmp_path, beside):
        path = write_model(tmp_path) if beside else tmp_path
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_bytes(safetensors_bytes())
        assert "holds an adapter (PEFT), which is not supported; merge it into the model first" in refusal(path)

    def test_broken_generation_config(self, tmp_path):
        (write_model(tmp_path) / "generation_config.json").write_text("{")
        assert "generation_config.json cannot be read" in refusal(tmp_path)

    @pytest.mark.parametrize("others", [[], ["pytorch_model.bin"]])
    def test_no_weights(self, tmp_path, others):
        assert "no *.safetensors file" in refusal(write_model(tmp_path, files=others))

    def test_a_pickle_beside_the_weights_is_not_read(self, tmp_path):
        """Whoever loads it makes a directory."""
        path = write_model(tmp_path / "model")
        for name in ("pytorch_model.bin", "model.pt", "consolidated.pth", "training_args.bin"):
            (path / name).write_bytes(pickle.dumps(Trap(str(tmp_path / "sprung"))))
        inspect(path)
        assert not (tmp_path / "sprung").exists()
        pickle.loads((path / "model.pt").read_bytes())
        assert (tmp_path / "sprung").exists()

    def test_an_index_that_names_a_missing_file(self, tmp_path):
        path = write_model(tmp_path, files=["one.safetensors"])
        write_index(path, {"a": "one.safetensors", "b": "two.safetensors"})
        assert "two.safetensors is named by the index but missing" in refusal(path)

    @pytest.mark.parametrize(
        "content",
        [
            "{",
            "[]",
            '{"weight_map": []}',
            '{"weight_map": null}',
            '{"weight_map": {"a": 1, "b": "x"}}',
            '{"weight_map": "x"}',
        ],
    )
    def test_a_broken_index(self, tmp_path, content):
        path = write_model(tmp_path)
        (path / "model.safetensors.index.json").write_text(content)
        assert refusal(path)

    def test_an_index_that_names_nothing(self, tmp_path):
        path = write_model(tmp_path)
        write_index(path, {})
        assert refusal(path)

    @pytest.mark.parametrize("where", ["nothing", "length", "header", "first byte of data", "last byte of data"])
    def test_weights_cut_short(self, tmp_path, where):
        path = write_model(tmp_path)
        whole = safetensors_bytes(64)
        left = {"nothing": 0, "length": 7, "header": 30, "first byte of data": len(whole) - 64, "last byte of data": -1}
        (path / "model.safetensors").write_bytes(whole[: left[where]])
        message = refusal(path)
        assert "model.safetensors" in message
        assert "cut short" in message

    def test_weights_cut_short_anywhere(self, tmp_path):
        path = write_model(tmp_path)
        whole = safetensors_bytes(16)
        for length in range(len(whole)):
            (path / "model.safetensors").write_bytes(whole[:length])
            assert "cut short" in refusal(path)
        (path / "model.safetensors").write_bytes(whole)
        inspect(path)

    def test_weights_that_are_too_long(self, tmp_path):
        path = write_model(tmp_path)
        (path / "model.safetensors").write_bytes(safetensors_bytes() + b"x")
        assert "model.safetensors" in refusal(path)

    @pytest.mark.parametrize(
        "header",
        [
            b"not json",
            b"[]",
            b"3",
            b'{"w": 3}',
            b'{"w": {}}',
            b'{"w": {"data_offsets": [0]}}',
            b'{"w": {"data_offsets": "x"}}',
            b'{"w": {"dtype": "F32", "data_offsets": [0, 1e999]}}',
            b'{"w": {"dtype": "F32", "data_offsets": [0, NaN]}}',
            b'{"w": ' + b"[" * 200_000,
        ],
        ids=range(10),
    )
    def test_weights_with_a_broken_header(self, tmp_path, header):
        path = write_model(tmp_path)
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert "model.safetensors has a broken safetensors header" in refusal(path)

    def test_a_header_that_claims_to_be_huge_is_not_read(self, tmp_path):
        path = write_model(tmp_path)
        (path / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + bytes(100))
        assert "cut short" in refusal(path)

    def test_weights_that_are_a_directory(self, tmp_path):
        (write_model(tmp_path, files=[]) / "model.safetensors").mkdir()
        assert "model.safetensors" in refusal(tmp_path)

    @pytest.mark.parametrize(
        ("tp", "changes", "words"),
        [
            (3, {}, "4 attention heads cannot be split over tp = 3"),
            (8, {}, "4 attention heads cannot be split over tp = 8"),
            (
                4,
                {"num_attention_heads": 12, "num_key_value_heads": 3},
                "3 key/value heads can be neither split nor repeated",
            ),
            (4, {"intermediate_size": 98}, "intermediate_size 98 cannot be split over tp = 4"),
            (2, {"moe_intermediate_size": 33}, "moe_intermediate_size 33 cannot be split over tp = 2"),
        ],
    )
    def test_what_cannot_be_split(self, tmp_path, tp, changes, words):
        assert words in refusal(write_model(tmp_path, **changes), tp=tp)

    @pytest.mark.parametrize(
        ("tp", "changes"),
        [(4, {}), (4, {"num_key_value_heads": 1}), (2, {"num_key_value_heads": None}), (1, {"intermediate_size": 97})],
    )
    def test_what_can_be_split(self, tmp_path, tp, changes):
        inspect(write_model(tmp_path, **changes), tp=tp)


class TestDigest:
    @pytest.fixture
    def path(self, tmp_path):
        return write_model(tmp_path / "first", files=["a.safetensors", "b.safetensors"])

    def test_is_the_same_for_a_copy_elsewhere(self, path, tmp_path):
        copy = write_model(tmp_path / "second", files=["a.safetensors", "b.safetensors"])
        assert inspect(path).digest == inspect(copy, name="other", max_context=64).digest

    @pytest.mark.parametrize(
        "change",
        [
            lambda path: write_model(path, files=["a.safetensors", "b.safetensors"], rope_theta=5.0),
            lambda path: (path / "tokenizer.json").write_text("{ }"),
            lambda path: (path / "tokenizer.json").unlink(),
            lambda path: (path / "a.safetensors").write_bytes(safetensors_bytes(fill=8)),
            lambda path: (path / "a.safetensors").write_bytes(safetensors_bytes(payload=65)),
            lambda path: (path / "b.safetensors").unlink(),
            lambda path: (path / "c.safetensors").write_bytes(safetensors_bytes()),
            lambda path: (path / "generation_config.json").write_text('{"eos_token_id": 2}'),
        ],
        ids=["config", "tokenizer", "no tokenizer", "values", "size", "file less", "file more", "end-of-text ids"],
    )
    def test_changes_with_whatever_changes_the_output(self, path, change):
        before = inspect(path).digest
        change(path)
        assert inspect(path).digest != before

    @pytest.mark.parametrize(
        "settings",
        [
            {"kv_compression": "none"},
            {"kv_compression": "immediate"},
            {"kv_compression": "per_layer", "kv_compressed_layers": (0,)},
            {"kv_hot_window": 128},
        ],
        ids=str,
    )
    def test_says_how_kv_is_compressed(self, path, settings):
        assert inspect(path, **settings).digest != inspect(path).digest
        assert inspect(path, **settings).digest == inspect(path, **settings, kv_tenant_share=0.5).digest

    @pytest.mark.parametrize(
        ("model_type", "rope", "decides"),
        [
            ("llama", {"rope_type": "dynamic"}, True),
            ("llama", {"rope_type": "longrope"}, True),
            ("llama", {"rope_type": "yarn"}, False),
            ("phi3", {"type": "yarn"}, True),
            ("phi3", {"type": "su", "original_max_position_embeddings": 64}, True),
            ("phimoe", {"rope_type": "linear", "short_mscale": 1.0, "long_mscale": 1.2}, True),
        ],
        ids=str,
    )
    def test_says_the_context_where_it_decides_over_frequencies(self, tmp_path, model_type, rope, decides):
        path = write_model(tmp_path, model_type=model_type, rope_scaling={"factor": 2.0, **rope})
        assert (inspect(path, max_context=64).digest != inspect(path).digest) == decides

    @pytest.mark.parametrize("at", [0, -1])
    def test_sees_a_change_in_either_end_of_a_large_file(self, tmp_path, at):
        path = write_model(tmp_path)
        whole = bytearray(safetensors_bytes(payload=3 * 2**20))
        (path / "model.safetensors").write_bytes(whole)
        before = inspect(path).digest
        whole[at if at else len(whole) - 3 * 2**20] ^= 1
        (path / "model.safetensors").write_bytes(whole)
        assert inspect(path).digest != before
