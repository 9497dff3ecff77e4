"""Compiles the grammars of requests, with llguidance, and keeps those that were used last.

Compiling happens in threads, once for all requests that wait for the same grammar. It is bounded in the size of its
text, in work and memory (llguidance's limits), in time, in how many grammars wait for it, and in how much all compiled
grammars together, and those of one tenant, take.
"""

import asyncio
import logging
import math
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_common.protocol import JSON_SCHEMA_OPTIONS

from lockstep_engine.constraint import Constraint, MaskThreads, Vocabulary, as_failure, describe
from lockstep_engine.deep_threads import DeepThreads
from lockstep_engine.model_config import ModelInfo
from lockstep_engine.request import Grammar, GrammarKind, Request

logger = logging.getLogger("lockstep.engine")

_RULES = 1
"""Version of what this module and `constraint` decide about masks; part of the engine's name."""
_THREADS = 2
MAX_WAITING = 64
"""Grammars that are compiled or wait for it."""
COMPILE_TIMEOUT_S = 10.0
"""For a grammar to wait for a thread and be compiled. One that is not ready then takes too long on any worker if it had
at least half of that time for itself."""
LOAD_TIMEOUT_S = 120.0
"""For the tokenizer to be read. An engine is not ready before; most take a second."""
MAX_CACHED = 256
MAX_CACHED_BYTES = 256 << 20
MAX_LIVE_BYTES = 1 << 30
_GRAMMAR_BYTES = 64 << 10
_BYTES_OF_A_CHAR = 1024
"""Memory of a compiled grammar, estimated: this much for each byte of its text."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Limits of one grammar: about 20 ms to build its lexer, 15 ms of its lexer for a mask, and 1 to 2 kB for each lexer
state. Masks of very ambiguous grammars were seen to take 0.15 s."""


class GrammarCompiler:
    """Turns the grammar of a request into a constraint.

    Args:
        model: whose tokens the masks are about.
        threads: what computes masks later.
    """

    def __init__(self, model: ModelInfo, threads: MaskThreads) -> None:
        self._model = model
        self._masks = threads
        self._threads = DeepThreads("grammar-compiler", _THREADS)
        self._tokenizer: LLTokenizer | None = None
        self._vocabulary: Vocabulary | None = None
        self._cache = _Cache()
        self._compilations: dict[Grammar, _Compilation] = {}
        self._queue = threading.RLock()  # of `_compilations` and what waits for each
        self._live_bytes = 0
        self._tenant_bytes: Counter[str] = Counter()
        """What is in use, of all and of each tenant that has any."""
        self._tenants: set[str] = set()
        """The first tenants that have asked for a grammar, at most two: whether there are several."""
        self._live = threading.RLock()  # a constraint may end in any thread
        self.name = ""
        """Name and version of what computes masks: engines with equal ones compute equal masks. Empty: this engine
        takes no grammars, or does not know yet."""

    async def load(self) -> None:
        """Read the tokenizer. If it cannot be used, the engine takes no grammars, and the reason is logged."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                self._tokenizer = await asyncio.wrap_future(self._threads.submit(self._load))
        except TimeoutError:
            logger.warning("the model takes no grammars: its tokenizer was not read within %g s", LOAD_TIMEOUT_S)
            return
        except (OSError, ValueError, RuntimeError, LockstepError) as error:
            logger.warning("the model takes no grammars: %s", " ".join(str(error).split())[:300])
            return
        self._vocabulary = Vocabulary(self._model.vocab_size, self._tokenizer.vocab_size, self._model.eos_ids)
        self.name = f"{llguidance.get_version()} rules@{_RULES}"

    def check(self, grammar: Grammar) -> None:
        """Refuse a grammar at once if this engine takes none, or if too many others are being compiled.

        Raises:
            LockstepError: INVALID_REQUEST or OVERLOADED.
        """
        if not self.name:
            raise invalid(grammar.field, "is not supported by this worker, because its tokenizer cannot be used for it")
        if grammar not in self._compilations and len(self._compilations) >= MAX_WAITING:
            raise _overloaded()

    async def compile(self, request: Request) -> Constraint:
        """The request's place in its grammar, after the ids that it has emitted.

        All grammars in use together take at most `MAX_LIVE_BYTES`. Those of one tenant may take all of it until a
        second tenant asks for a grammar, and half of it from then on: what a tenant has above that comes back as its
        streams end.

        Raises:
            LockstepError: INVALID_REQUEST, the grammar cannot be compiled or does not fit `emitted_ids`; OVERLOADED.
        """
        grammar = request.sampling.grammar
        assert grammar is not None
        self.check(grammar)
        tenant, size = request.tenant, _estimated_bytes(grammar)
        self._check_room(tenant, size)
        compilation, work = self._join(request, grammar)
        self._count(tenant, size)
        constraint = None
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                constraint = await asyncio.wrap_future(work)
        except TimeoutError:
            # It had to wait for others: all the time, or so long that little was left for it.
            if time.monotonic() - compilation.began_s < COMPILE_TIMEOUT_S / 2:
                raise _overloaded() from None
            raise invalid(grammar.field, f"takes longer than {COMPILE_TIMEOUT_S:g} s to compile") from None
        finally:
            self._leave(compilation, work)
            if constraint is None:
                self._count(tenant, -size)
        weakref.finalize(constraint, self._count, tenant, -size)
        return constraint

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def _check_room(self, tenant: str, size: int) -> None:
        if len(self._tenants) < 2:
            self._tenants.add(tenant)
        with self._live:
            own_bytes = self._tenant_bytes[tenant] + size
            all_bytes = self._live_bytes + size
        if all_bytes > MAX_LIVE_BYTES or own_bytes > MAX_LIVE_BYTES // len(self._tenants):
            raise _overloaded()

    def _count(self, tenant: str, size: int) -> None:
        with self._live:
            self._live_bytes += size
            self._tenant_bytes[tenant] += size
            if not self._tenant_bytes[tenant]:
                del self._tenant_bytes[tenant]

    def _load(self) -> LLTokenizer:
        if not self._model.eos_ids:
            raise ValueError("it has no end-of-text token")
        text = (self._model.path / "tokenizer.json").read_text(encoding="utf-8")
        eos_ids = list(self._model.eos_ids)
        try:
            return LLTokenizer(text, n_vocab=self._model.vocab_size, eos_token=eos_ids)
        except ValueError:  # the tokenizer has more tokens than the model
            return LLTokenizer(text, eos_token=eos_ids)
        except Exception:
            raise
        except BaseException as error:  # a panic of the library
            raise as_failure(error) from None

    def _join(self, request: Request, grammar: Grammar) -> "tuple[_Compilation, Future[Constraint]]":
        """Have a grammar compiled, unless that is under way, and wait for it."""
        work: Future[Constraint] = Future()
        with self._queue:
            compilation = self._compilations.get(grammar)
            if compilation is None:
                compilation = _Compilation(grammar)
                self._threads.put(partial(self._serve, compilation))
                self._compilations[grammar] = compilation
            compilation.waiting[work] = request
        return compilation, work

    def _leave(self, compilation: "_Compilation", work: Future[Constraint]) -> None:
        """A request waits no longer. Its grammar is not compiled if no other request waits for it and no thread has
        begun.
        """
        with self._queue:
            compilation.waiting.pop(work, None)
            if compilation.began_s == math.inf and not compilation.waiting:
                self._end(compilation)

    def _next(self, compilation: "_Compilation") -> tuple[Future[Constraint], Request] | None:
        """A request that waits for a grammar. If there is none the compilation has ended."""
        with self._queue:
            first = next(iter(compilation.waiting), None)
            if first is None:
                self._end(compilation)
                return None
            return first, compilation.waiting.pop(first)

    def _end(self, compilation: "_Compilation") -> None:
        if self._compilations.get(compilation.grammar) is compilation:
            del self._compilations[compilation.grammar]

    def _serve(self, compilation: "_Compilation") -> None:
        """In a thread: compile a grammar, and make the constraints of all that wait for it."""
        grammar, made = compilation.grammar, None
        key = (grammar.kind, grammar.text)
        while (waiting := self._next(compilation)) is not None:
            work, request = waiting
            if not work.set_running_or_notify_cancel():
                continue
            try:
                compilation.began_s = time.monotonic()
                if made is None:
                    made = self._find(grammar)
                else:
                    self._cache.get(key)  # it is the one used last again
                if isinstance(made, LockstepError):
                    work.set_exception(made)
                else:
                    work.set_result(self._constrain(request, made))
            except BaseException as error:
                self._cache.drop(key)
                made = None
                work.set_exception(as_failure(error))

    def _find(self, grammar: Grammar) -> LLMatcher | LockstepError:
        """A compiled grammar, or why it cannot be compiled."""
        key = (grammar.kind, grammar.text)
        matcher = self._cache.get(key)
        if matcher is None:
            try:
                matcher = self._compile(grammar)
            except LockstepError as error:
                return error
            self._cache.put(key, matcher, _estimated_bytes(grammar))
        return matcher

    def _constrain(self, request: Request, matcher: LLMatcher) -> Constraint:
        assert self._vocabulary is not None
        return Constraint(matcher.deep_copy(), request.sampling, self._vocabulary, self._masks, request.emitted_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            text = _source(grammar)
        except (ValueError, RecursionError) as error:
            raise invalid(grammar.field, f"cannot be compiled: {' '.join(str(error).split())[:300]}") from None
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise invalid(grammar.field, f"cannot be compiled: {describe(matcher)}")
        return matcher


@dataclass(eq=False)
class _Compilation:
    """A grammar that is compiled or waits for a thread, and the requests that wait for it."""

    grammar: Grammar
    waiting: dict[Future[Constraint], Request] = field(default_factory=dict)
    began_s: float = math.inf
    """When the thread began what it does for it now: compiling it, or one constraint. inf: no thread has begun."""


class _Cache:
    """Compiled grammars at their beginning, the one used last at the end. Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[GrammarKind, str], tuple[LLMatcher, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[GrammarKind, str]) -> LLMatcher | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: tuple[GrammarKind, str], matcher: LLMatcher, size: int) -> None:
        with self._lock:
            self._remove(key)
            self._entries[key] = matcher, size
            self._bytes += size
            while len(self._entries) > MAX_CACHED or self._bytes > MAX_CACHED_BYTES:
                self._remove(next(iter(self._entries)))

    def drop(self, key: tuple[GrammarKind, str]) -> None:
        with self._lock:
            self._remove(key)

    def _remove(self, key: tuple[GrammarKind, str]) -> None:
        entry = self._entries.pop(key, None)
        self._bytes -= 0 if entry is None else entry[1]


def most_at_once(grammars: Collection[Grammar]) -> int:
    """How many requests with these grammars an engine takes at once if it serves no other requests: half of its limits,
    because what has ended may still be held for a moment.
    """
    largest = max(map(_estimated_bytes, grammars), default=_GRAMMAR_BYTES)
    most = MAX_LIVE_BYTES // 2 // largest
    if len(set(grammars)) > MAX_WAITING // 2:
        most = min(most, MAX_WAITING // 2)
    return max(1, most)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_SCHEMA_OPTIONS)  # type: ignore[arg-type]
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_SCHEMA_OPTIONS)  # type: ignore[arg-type]
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return grammar_from("grammar", grammar.text)


def _estimated_bytes(grammar: Grammar) -> int:
    return _GRAMMAR_BYTES + _BYTES_OF_A_CHAR * len(grammar.text)


def _overloaded() -> LockstepError:
    return LockstepError(ErrorCode.OVERLOADED, "too many grammars are being compiled or in use", retry_after_s=1.0)
