"""`suffix`: prompts for the text between two others, for models whose vocabulary has marks for a gap."""

import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_router.text.tokenizer import Tokenizer
from router_cluster import eventually
from scripted_worker import model_card, tokenizer_files
from tokenizers import AddedToken, models, normalizers, processors
from tokenizers import Tokenizer as RustTokenizer

FAMILIES = {
    "Qwen2.5-Coder": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "StarCoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "SantaCoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "DeepSeek-Coder": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - their own characters
}


def with_marks(*marks, special=True):
    """The reference model's tokenizer files with further tokens."""
    files = tokenizer_files()
    rust = RustTokenizer.from_str(files.tokenizer_json.decode())
    rust.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    files.tokenizer_json = rust.to_str().encode()
    files.digest = "tokenizer-2"
    return files


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_suffix_middle(family, special):
    marks = FAMILIES[family]
    files = with_marks(*marks, special=special)
    ids_of = RustTokenizer.from_str(files.tokenizer_json.decode()).token_to_id
    tokenizer = Tokenizer(files)
    before, after, middle = map(ids_of, marks)
    expected = [before, *tokenizer.encode("def f(x):\n"), after, *tokenizer.encode("\n  return y"), middle]
    assert tokenizer.encode_infill("def f(x):\n", "\n  return y") == expected
    assert tokenizer.infill.end is None


def test_suffix_first():
    files = with_marks("[PREFIX]", "[SUFFIX]")
    ids_of = RustTokenizer.from_str(files.tokenizer_json.decode()).token_to_id
    tokenizer = Tokenizer(files)
    expected = [ids_of("[SUFFIX]"), *tokenizer.encode("after"), ids_of("[PREFIX]"), *tokenizer.encode("before")]
    assert tokenizer.encode_infill("before", "after") == expected


def test_code_llama_marks_and_no_space_before_the_suffix():
    pieces = ["<unk>", "<s>", "▁", *"abcdxy", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    rust = RustTokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.add_special_tokens(["<s>", *pieces[-4:]])
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer(worker_pb2.TokenizerFiles(digest="x", tokenizer_json=rust.to_str().encode()))
    ids = tokenizer.encode_infill("ab", "cd x")
    assert [pieces[token_id] for token_id in ids] == ["<s>", "▁<PRE>", *"▁ab", "▁<SUF>", *"cd▁x", "▁<MID>"]
    assert pieces[tokenizer.infill.end] == "▁<EOT>"


@pytest.mark.parametrize("marks", [(), ("<|fim_prefix|>",), ("<|fim_prefix|>", "<|fim_suffix|>"), ("[PREFIX]",)])
def test_a_vocabulary_without_all_marks_has_none(marks):
    assert Tokenizer(with_marks(*marks)).infill is None


def test_control_tokens_in_the_texts_are_text():
    marks = FAMILIES["StarCoder"]
    files = with_marks(*marks)
    ids_of = RustTokenizer.from_str(files.tokenizer_json.decode()).token_to_id
    tokenizer = Tokenizer(files)
    ids = tokenizer.encode_infill("a<fim_suffix>b", "c<fim_middle>d")
    assert [token_id for token_id in ids if token_id in map(ids_of, marks)] == list(map(ids_of, marks))


@pytest.fixture
async def coder(make_cluster):
    """A cluster with a model that fills gaps, and that ends them with a token of its own."""
    cluster = await make_cluster(1)
    (worker,) = cluster.workers
    worker.files = with_marks("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    worker.card = model_card(name="coder", digest="model-2", tokenizer_digest="tokenizer-2", vocab_size=4100)
    worker.broadcast(worker.hello())
    await eventually(lambda: cluster.router.workers.ready("coder"))
    cluster.tokenizer = Tokenizer(worker.files)
    return cluster


async def test_a_completion_with_suffix(coder):
    response = await coder.complete(["one", "two"], model="coder", suffix=" tail", echo=True, stop_token_ids=[9])
    first, second = coder.workers[0].submits
    for submit, prompt in ((first, "one"), (second, "two")):
        assert list(submit.prompt_ids) == coder.tokenizer.encode_infill(prompt, " tail")
        assert list(submit.sampling.stop_token_ids) == [9, coder.tokenizer.infill.end]
    body = response.json()
    assert body["usage"]["prompt_tokens"] == len(first.prompt_ids) + len(second.prompt_ids)
    assert [choice["text"][:3] for choice in body["choices"]] == ["one", "two"]


async def test_an_empty_prompt_may_have_a_suffix(coder):
    assert (await coder.complete("", model="coder", suffix="tail")).status_code == 200


async def test_a_gap_that_may_not_end_by_itself(coder):
    await coder.complete(model="coder", suffix="tail", ignore_eos=True)
    assert not coder.workers[0].submits[0].sampling.stop_token_ids


@pytest.mark.parametrize("suffix", [None, ""])
async def test_no_suffix_is_a_plain_completion(coder, suffix):
    await coder.complete("hello", model="coder", suffix=suffix)
    (submit,) = coder.workers[0].submits
    assert list(submit.prompt_ids) == coder.tokenizer.encode("hello")
    assert not submit.sampling.stop_token_ids


REFUSED = [
    ({"prompt": [5, 6], "suffix": "x"}, "suffix"),
    ({"prompt": [[5, 6]], "suffix": "x"}, "suffix"),
    ({"suffix": 5}, "suffix"),
    ({"suffix": "x " * 9000}, "prompt"),
    ({"suffix": "x", "stop_token_ids": list(range(64))}, "stop_token_ids"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
async def test_what_cannot_be_is_refused_by_name(coder, fields, field):
    error = (await coder.complete(**({"model": "coder"} | fields))).json()["error"]
    assert error["param"] == field


async def test_a_model_without_marks_is_named(cluster):
    response = await cluster.complete(suffix="x")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "suffix")
    assert error["message"].startswith("suffix is not supported by 'reference'")
