"""Grammars are compiled within bounds, and a constraint is a pure function of its grammar and its tokens."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLMatcher
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import EngineConfig, Grammar, GrammarKind, Request, SamplingParams
from lockstep_engine import constraint as constraints
from lockstep_engine import grammar as grammars
from lockstep_engine.constraint import MaskThreads, Vocabulary, as_failure
from lockstep_engine.grammar import GrammarCompiler
from lockstep_engine.model_config import inspect_model
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[3] / "models/reference"
INFO = inspect_model(EngineConfig(model=str(MODEL)))
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
EOS = INFO.eos_ids[0]
WAIT_S = 60


@pytest.fixture
def compiler_with():
    """Makes a compiler for whose constraints these threads compute masks."""
    made = []

    def make(threads):
        made.append(GrammarCompiler(INFO, threads))
        asyncio.run(made[-1].load())
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def compiler(compiler_with):
    return compiler_with(MaskThreads(lambda: None))


class Grammars:
    """In place of llguidance's `LLMatcher`: `note` is called with each grammar that is compiled."""

    def __init__(self, note):
        def noting(translate):
            return lambda text, **options: note(text) or translate(text, **options)

        self.grammar_from_regex = noting(LLMatcher.grammar_from_regex)
        self.grammar_from_json_schema = noting(LLMatcher.grammar_from_json_schema)

    def __call__(self, *arguments, **options):
        return LLMatcher(*arguments, **options)


def request(kind, text="", *, emitted=(), field="response_format", **sampling):
    params = SamplingParams(grammar=Grammar(GrammarKind(kind), text, field), **sampling)
    return Request("r", (2,), params, tuple(emitted))


def compiled(compiler, *arguments, **options):
    return asyncio.run(compiler.compile(request(*arguments, **options)))


def refused(compiler, *arguments, **options):
    with pytest.raises(LockstepError) as caught:
        compiled(compiler, *arguments, **options)
    return caught.value


def wait_until_used(compiler, size):
    """Wait until grammars take so many bytes and no thread works: the one that made one may hold it for a moment."""
    end = time.monotonic() + 10
    while compiler._live_bytes != size or compiler._compilations:
        assert time.monotonic() < end
        time.sleep(0.01)


def allowed(constraint):
    """The ids that a constraint allows."""
    bits = np.unpackbits(constraint.mask.view(np.uint8), count=INFO.vocab_size, bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def texts(ids):
    return {TOKENIZER.decode([id_], skip_special_tokens=False) for id_ in ids}


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def follow(constraint, text):
    """Take a text's tokens, each of which must be allowed."""
    for token in encode(text):
        assert token in allowed(constraint)
        constraint.consume(token)
        assert constraint.error is None


class TestKinds:
    def test_a_choice(self, compiler):
        constraint = compiled(compiler, "lark", 'start: "y" | "n" | "né"')
        assert texts(allowed(constraint)) >= {"y", "n"}
        assert EOS not in allowed(constraint)
        follow(constraint, "y")
        assert allowed(constraint) == {EOS}

    @pytest.mark.parametrize(
        ("kind", "text", "good", "bad"),
        [
            ("json_object", "", '{"a": [1, null]}', "[1]"),
            ("json_schema", '{"type": "array", "items": {"type": "integer"}}', "[1, 23]", '["a"]'),
            ("regex", "[0-9]{3}-(ab)+", "123-abab", "12-ab"),
            ("lark", 'start: x "." x\nx: /[a-z]/', "a.b", "a-b"),
            ("lark", 'root ::= "a" b\nb ::= [0-9]+', "a12", "ab"),  # GBNF
        ],
    )
    def test_a_text_that_conforms_can_be_written_and_another_cannot(self, compiler, kind, text, good, bad):
        constraint = compiled(compiler, kind, text)
        follow(constraint, good)
        assert EOS in allowed(constraint)
        other = compiled(compiler, kind, text)
        outside = next((token for token in encode(bad) if not self.takes(other, token)), None)
        assert outside is not None

    @staticmethod
    def takes(constraint, token):
        if token not in allowed(constraint):
            return False
        constraint.consume(token)
        return True

    def test_white_space_of_json_ends(self, compiler):
        constraint = compiled(compiler, "json_object")
        follow(constraint, "{\n" + " " * 32)
        assert not any(not text.strip() for text in texts(allowed(constraint)))


class TestEnds:
    def test_min_tokens_and_ignore_eos_put_off_the_end_while_something_else_can_follow(self, compiler):
        short = compiled(compiler, "regex", "a*", min_tokens=2)
        assert EOS not in allowed(short)
        follow(short, "a")
        assert EOS not in allowed(short)
        follow(short, "a")
        assert EOS in allowed(short)
        assert EOS not in allowed(compiled(compiler, "regex", "a*", ignore_eos=True))

    def test_nothing_puts_off_the_end_of_a_complete_output(self, compiler):
        constraint = compiled(compiler, "regex", "a", min_tokens=9, ignore_eos=True)
        follow(constraint, "a")
        assert allowed(constraint) == {EOS}

    def test_stop_ids_are_put_off_while_something_else_can_follow(self, compiler):
        (a,), (b,) = encode("a"), encode("b")
        constraint = compiled(compiler, "regex", "[ab]", min_tokens=5, stop_token_ids=(a,))
        assert a not in allowed(constraint)
        assert b in allowed(constraint)
        assert allowed(compiled(compiler, "regex", "a", min_tokens=5, stop_token_ids=(a,))) == {a}


class TestReplay:
    def test_every_position_has_the_same_mask(self, compiler):
        text = '{"a": [1, {"b": "x\\n"}], "c": -1.5e3}'
        ids = encode(text)
        constraint = compiled(compiler, "json_object")
        for count, token in enumerate(ids):
            resumed = compiled(compiler, "json_object", emitted=ids[:count])
            assert (resumed.mask == constraint.mask).all()
            constraint.consume(token)

    def test_a_token_that_the_grammar_does_not_allow_is_refused(self, compiler):
        ids = encode("12x4")
        error = refused(compiler, "regex", "[0-9]+", emitted=ids)
        assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "emitted_ids")
        assert f"position {ids.index(encode('x')[0])}" in error.message

    def test_a_token_that_is_not_allowed_ends_a_constraint_with_an_error(self, compiler):
        constraint = compiled(compiler, "regex", "[0-9]+")
        constraint.consume(encode("x")[0])
        assert constraint.error.code is ErrorCode.INVALID_REQUEST
        assert constraint.error.field == "response_format"


class Panic(BaseException):
    """What a panic of a Rust library is: no Exception."""


class TestPanics:
    def test_a_panic_ends_one_request(self, compiler, monkeypatch):
        def panic(*_):
            raise Panic

        constraint = compiled(compiler, "regex", "a*")
        monkeypatch.setattr(Vocabulary, "compute", panic)
        constraint.consume(encode("a")[0])
        assert constraint.error.code is ErrorCode.INTERNAL
        monkeypatch.undo()
        with monkeypatch.context() as patch:
            patch.setattr(grammars, "LLMatcher", Grammars(panic))
            assert refused(compiler, "regex", "b*").code is ErrorCode.INTERNAL
        assert compiled(compiler, "regex", "a*").mask is not None

    def test_a_panic_over_the_tokenizer_leaves_an_engine_without_grammars(self, monkeypatch):
        def panic(*_, **__):
            raise Panic

        monkeypatch.setattr(grammars, "LLTokenizer", panic)
        compiler = GrammarCompiler(INFO, MaskThreads(lambda: None))
        asyncio.run(compiler.load())
        assert compiler.name == ""


class TestRefusals:
    @pytest.mark.parametrize(
        ("kind", "text", "reason"),
        [
            ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
            ("json_schema", '{"type": "string", "format": "zip"}', "Unknown format: zip"),
            ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "Unimplemented"),
            ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
            ("json_schema", '{"a":', "EOF"),
            ("json_schema", '{"type": "object", "properties": {"a": false}, "required": ["a"]}', "nsatisfiable"),
            ("json_schema", "[1]", "cannot be compiled"),
            ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "recursion limit"),
            ("regex", "(a", "unclosed group"),
            ("regex", r"(a)\1", "backreferences"),
            ("regex", "(" * 30_000 + ")" * 30_000, "invalid regex"),
            ("lark", "start: nothing", 'unknown name: "nothing"'),
            ("lark", "start: " + "(" * 30_000, "nested"),
            ("lark", "root ::= " + "(" * 30_000, "recursion"),
            ("regex", "\x00\ud7ff[^\\s\\S]", "NoExtension"),
        ],
    )
    def test_the_error_names_the_field_and_says_why(self, compiler, kind, text, reason):
        error = refused(compiler, kind, text, field="structured_outputs.x")
        assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "structured_outputs.x")
        assert reason in error.message
        assert len(error.message) < 400
        assert "\n" not in error.message

    def test_no_memory_for_a_grammar_may_pass(self):
        assert as_failure(MemoryError()).code is ErrorCode.OVERLOADED

    def test_an_engine_without_a_tokenizer_takes_none(self, tmp_path):
        compiler = GrammarCompiler(replace(INFO, path=tmp_path), MaskThreads(lambda: None))
        asyncio.run(compiler.load())
        assert compiler.name == ""
        assert refused(compiler, "json_object").field == "response_format"

    def test_a_model_without_an_end_of_text_takes_none(self):
        compiler = GrammarCompiler(replace(INFO, eos_ids=()), MaskThreads(lambda: None))
        asyncio.run(compiler.load())
        assert compiler.name == ""


class TestBounds:
    CHAINS = """
import asyncio, json, sys
from test_grammar import GrammarCompiler, INFO, LockstepError, MaskThreads, request
async def main():
    compiler = GrammarCompiler(INFO, MaskThreads(lambda: None))
    await compiler.load()
    n = 7000
    lark = "start: a0\\n" + "\\n".join(f"a{i:x}:a{i+1:x}" for i in range(n - 3000)) + f"\\na{n-3000:x}:/b/"
    terminals = lark.replace("a", "A").replace("stArt", "start")
    refs = {f"{i:x}": {"$ref": f"#/$defs/{i+1:x}"} for i in range(1800)} | {f"{1800:x}": {"type": "null"}}
    items = {f"{i:x}": {"items": {"$ref": f"#/$defs/{i+1:x}"}} for i in range(1300)} | {f"{1300:x}": {"type": "null"}}
    fields = {f"{i:x}": {"properties": {"a": {"$ref": f"#/$defs/{i+1:x}"}}} for i in range(1000)} | {f"{1000:x}": True}
    texts = [("lark", lark), ("lark", terminals), ("regex", "a?" * 3000)]
    texts += [("json_schema", json.dumps({"$ref": "#/$defs/0", "$defs": each})) for each in (refs, items, fields)]
    for kind, text in texts:
        made = request(kind, text)
        made.sampling.validate(4096)
        try:
            await compiler.compile(made)
        except LockstepError as error:
            assert error.code == "invalid_request", error
    print("alive")
asyncio.run(main())
"""

    def test_long_chains_do_not_end_the_process(self):
        """Compiling recurses once for each link. On a stack of the usual size these end the process."""
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", self.CHAINS],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.stdout == "alive\n", done.stderr

    def test_what_all_grammars_in_use_take_is_bounded_and_returned(self, compiler, monkeypatch):
        size = grammars._estimated_bytes(Grammar(GrammarKind.JSON_OBJECT))
        monkeypatch.setattr(grammars, "MAX_LIVE_BYTES", 2 * size)
        used = [compiled(compiler, "json_object") for _ in range(2)]
        assert refused(compiler, "json_object").code is ErrorCode.OVERLOADED
        used.pop()
        wait_until_used(compiler, size)
        used.append(compiled(compiler, "json_object"))
        used.clear()
        wait_until_used(compiler, 0)

    def test_a_refused_grammar_takes_nothing(self, compiler):
        refused(compiler, "regex", "(a")
        wait_until_used(compiler, 0)

    def test_the_grammars_used_last_are_kept(self, compiler, monkeypatch):
        made = []
        monkeypatch.setattr(grammars, "LLMatcher", Grammars(made.append))
        monkeypatch.setattr(grammars, "MAX_CACHED", 2)
        for text in ["a", "b", "a", "c", "a", "b"]:
            compiled(compiler, "regex", text)
            wait_until_used(compiler, 0)
        assert made == ["a", "b", "c", "b"]
        monkeypatch.setattr(grammars, "MAX_CACHED_BYTES", 0)
        compiled(compiler, "regex", "d")
        assert compiler._cache._bytes == len(compiler._cache._entries) == 0

    def test_streams_of_one_grammar_do_not_share_their_place(self, compiler):
        first, second = (compiled(compiler, "regex", "[a-z][0-9]") for _ in range(2))
        follow(first, "a")
        follow(second, "a")
        assert allowed(first) == allowed(second) == {encode(digit)[0] for digit in "0123456789"}


class TestMaskThreads:
    def test_the_driver_computes_quick_masks_itself_for_a_limited_time(self, compiler_with, monkeypatch):
        threads = MaskThreads(lambda: None)
        constraint = compiled(compiler_with(threads), "regex", "a*")
        computed_by = []
        consume = constraint.consume
        monkeypatch.setattr(
            constraint, "consume", lambda token: computed_by.append(threading.current_thread()) or consume(token)
        )
        token = encode("a")[0]
        constraint.advance(token)
        assert constraint.mask is not None
        monkeypatch.setattr(constraints, "DRIVER_S", 0.0)
        constraint.advance(token)
        threads.settle(WAIT_S)
        monkeypatch.undo()
        assert [each is threading.current_thread() for each in computed_by] == [True, False]
        threads.begin_step()
        assert threads._driver_s == 0
        threads.close()

    def test_the_driver_never_computes_what_was_not_quick_or_has_a_long_text(self, compiler, monkeypatch):
        assert not compiled(compiler, "regex", "[ab]" * 1100).is_quick
        assert not compiled(compiler, "lark", 'start: "a"').is_quick
        constraint = compiled(compiler, "regex", "a*")
        assert constraint.is_quick
        monkeypatch.setattr(constraints, "QUICK_S", -1.0)
        constraint.consume(encode("a")[0])
        monkeypatch.undo()
        constraint.consume(encode("a")[0])
        assert not constraint.is_quick

    def test_the_driver_waits_for_threads_but_not_for_slow_grammars(self, compiler_with, monkeypatch):
        changes = []
        threads = MaskThreads(lambda: changes.append(1))
        constraint = compiled(compiler_with(threads), "regex", "a*")
        constraint.is_quick = False
        blocked = threading.Event()
        consume = constraint.consume
        monkeypatch.setattr(constraint, "consume", lambda token: blocked.wait(WAIT_S) and consume(token))
        constraint.advance(encode("a")[0])
        assert not threads.is_settled
        threads.settle(0.001)
        assert constraint.mask is None
        blocked.set()
        threads.settle(WAIT_S)
        assert constraint.mask is not None
        assert threads.is_settled

        blocked.clear()
        constraint.is_slow = True
        constraint.advance(encode("a")[0])
        assert threads.is_settled  # nobody waits for it
        blocked.set()
        threads.close()

    def test_the_driver_is_told_of_masks_that_it_has_missed_and_of_failures(self, compiler_with):
        told = threading.Event()
        threads = MaskThreads(told.set)
        constraint = compiled(compiler_with(threads), "regex", "a*")
        constraint.is_quick, constraint.is_slow = False, True
        constraint.advance(encode("a")[0])
        assert told.wait(WAIT_S)
        assert constraint.mask is not None
        told.clear()
        constraint.advance(encode("b")[0])
        assert told.wait(WAIT_S)
        assert threads.has_failed
        assert constraint.error is not None
        threads.close()

    def test_a_grammar_whose_mask_took_long_counts_as_slow(self, compiler, monkeypatch):
        constraint = compiled(compiler, "regex", "a*")
        monkeypatch.setattr(constraints, "SLOW_S", -1.0)
        constraint.consume(encode("a")[0])
        assert constraint.is_slow


def test_random_walks_stay_in_the_grammar(compiler):
    """The mask has exactly the tokens that a fresh matcher takes."""
    rng = random.Random(4)
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": ["é", "b"]}, "c": {"type": "integer"}}})
    ids = []
    for _ in range(25):
        constraint = compiled(compiler, "json_schema", schema, emitted=ids)
        inside = allowed(constraint)
        for token in rng.sample(range(2, INFO.vocab_size), 3):
            outcome = None
            try:
                compiled(compiler, "json_schema", schema, emitted=[*ids, token])
            except LockstepError as error:
                outcome = error.field
            assert (outcome is None) == (token in inside)
        if inside == {EOS}:
            break
        ids.append(rng.choice(sorted(inside - {EOS})))


def test_a_thread_that_cannot_be_started_fails_its_request_alone(monkeypatch):
    threads, reported = MaskThreads(lambda: reported.append(1)), []
    constraint = SimpleNamespace(is_quick=False, is_slow=False, error=None)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads.start(constraint, 5)
    assert constraint.error.code is ErrorCode.OVERLOADED
    assert (threads.is_settled, threads.has_failed, reported) == (True, True, [1])
