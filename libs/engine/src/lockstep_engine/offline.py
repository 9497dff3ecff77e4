"""The engine for scripts, without services: text in, text out, in the calling thread."""

import asyncio
import itertools
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tqdm import tqdm

from lockstep_engine.config import EngineConfig
from lockstep_engine.engine import AsyncEngine
from lockstep_engine.engine_status import EngineState
from lockstep_engine.grammar import most_at_once
from lockstep_engine.model_config import refuse
from lockstep_engine.request import Output, PromptLogprobs, PromptScores, Request, SamplingParams

Prompt = str | Sequence[int]
_T = TypeVar("_T")


class Engine:
    """Generates text from a model directory.

        with Engine("models/reference", tp=2) as engine:
            for text in engine.generate(["It was a dark night, and"], SamplingParams(max_tokens=50)):
                print(text)

    Args:
        model: directory of the model.
        settings: further fields of `EngineConfig`.

    Raises:
        LockstepError: the model cannot be served; one sentence says why.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self._outputs: dict[str, asyncio.Queue[Output] | _Collected] = {}
        self._numbers = itertools.count()
        self._engine = AsyncEngine(
            EngineConfig(model=str(model), **settings),
            on_outputs=self._deliver,
            on_change=lambda: None,
            on_progress=self._show_loading,
        )
        self._tokenizer = load_tokenizer(self._engine.model.path)
        self._loading = tqdm(
            total=100, desc="loading weights", unit="%", delay=1.0, leave=False, disable=not sys.stderr.isatty()
        )
        self._loop = asyncio.new_event_loop()
        try:
            self._await(self._engine.start())
        except BaseException:
            self.close()
            raise
        finally:
            self._loading.close()

    @property
    def core(self) -> AsyncEngine:
        """The `AsyncEngine` inside, for its model and status."""
        return self._engine

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, with what the tokenizer adds (begin-of-text) unless `special` is false."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[str]:
        """The generated texts. All prompts run together."""
        return [self.decode([id_ for output in each for id_ in output.ids]) for each in self.outputs(prompts, params)]

    def generate_ids(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """The generated token ids. All prompts run together."""
        return [[id_ for output in each for id_ in output.ids] for each in self.outputs(prompts, params)]

    def outputs(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Output]]:
        """All outputs for each prompt, with log probabilities and finish reasons."""
        each_params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        requests = [self._request(prompt, each) for prompt, each in zip(prompts, each_params, strict=True)]
        return self.run(requests)

    def run(self, requests: Sequence[Request]) -> list[list[Output]]:
        """All outputs of requests, which may continue earlier attempts. If one fails, its error is raised and the
        others are cancelled.
        """
        return self._await(self._collect(requests))

    def score(self, prompt: Prompt, *, vocabulary: bool = False) -> PromptLogprobs:
        """Log probabilities and ranks of a prompt's tokens from the second on.

        Args:
            prompt: text or token ids.
            vocabulary: return the log probabilities of the full vocabulary at each position, too.
        """
        scores = PromptScores.VOCABULARY if vocabulary else PromptScores.TOKENS
        params = SamplingParams(max_tokens=1, temperature=0, prompt_scores=scores)
        parts = [each.prompt_logprobs for each in self.outputs([prompt], params)[0]]
        given = [part for part in parts if part is not None]
        vocabularies = [part.vocabulary for part in given if part.vocabulary is not None]
        return PromptLogprobs(
            1,
            np.concatenate([part.tokens for part in given]) if given else np.empty(0, np.float32),
            np.concatenate([part.ranks for part in given]) if given else np.empty(0, np.int32),
            np.concatenate(vocabularies) if vocabularies else None,
        )

    def embed(self, prompts: Sequence[Prompt]) -> list[NDArray[np.float32]]:
        """The embeddings of prompts, each [hidden] and of length 1; for models that give any (see `EngineConfig`)."""
        params = SamplingParams(max_tokens=1)
        requests = [replace(self._request(prompt, params), embeds=True) for prompt in prompts]
        outputs = [output for each in self.run(requests) for output in each]
        return [output.embedding for output in outputs if output.embedding is not None]

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
        """Pieces of the generated text, as they come. Joined they equal the result of `generate`."""
        request = self._request(prompt, params)
        ids: list[int] = []
        given = ""
        decoder = DecodeStream(skip_special_tokens=True)
        try:
            outputs: asyncio.Queue[Output] = asyncio.Queue()
            self._await(self._submit(request, outputs))
            while True:
                output = self._await(outputs.get())
                if output.error is not None:
                    raise output.error
                for id_ in output.ids:
                    ids.append(id_)
                    piece = decoder.step(self._tokenizer, id_)
                    if piece:
                        given += piece
                        yield piece
                if output.finish is not None:
                    break
            rest = self.decode(ids)[len(given) :]
            if rest:
                yield rest
        finally:
            self._outputs.pop(request.id, None)
            self._engine.cancel(request.id)

    def close(self) -> None:
        """Stop the ranks. The engine cannot be used again."""
        if not self._loop.is_closed():
            self._await(self._engine.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        return Request(f"offline-{next(self._numbers)}", tuple(ids), params)

    def _show_loading(self) -> None:
        self._loading.update(round(100 * self._engine.status().loading) - self._loading.n)

    def _deliver(self, _step: int, outputs: list[Output]) -> None:
        for output in outputs:
            box = self._outputs.get(output.request_id)
            if box is not None:
                box.put_nowait(output)

    async def _submit(self, request: Request, outputs: "asyncio.Queue[Output] | _Collected") -> None:
        async with asyncio.timeout(self._engine.config.start_timeout_s):
            # A rank was lost: the new group starts only while this loop runs.
            while self._engine.status().state is EngineState.RESTARTING:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self._outputs[request.id] = outputs
        self._engine.submit(request)

    async def _collect(self, requests: Sequence[Request]) -> list[list[Output]]:
        """Run requests, at most `max_queue` at a time, and as many with grammars as the engine takes at once. If one
        fails, cancel the rest.
        """
        room = asyncio.Semaphore(self._engine.config.max_queue)
        grammars = [each.sampling.grammar for each in requests if each.sampling.grammar is not None]
        grammar_room = asyncio.Semaphore(most_at_once(grammars))

        async def one(request: Request) -> list[Output]:
            async with grammar_room if request.sampling.grammar is not None else nullcontext(), room:
                outputs = _Collected()
                try:
                    await self._submit(request, outputs)
                    return await outputs.all()
                finally:
                    self._outputs.pop(request.id, None)
                    self._engine.cancel(request.id)

        tasks = [asyncio.ensure_future(one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _await(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)


class _Collected:
    """The outputs of a request at which nobody looks before it has ended: to wake a task for each token would take
    longer than the driver's other work for it.
    """

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._ended = asyncio.Event()

    def put_nowait(self, output: Output) -> None:
        """The request's next output."""
        self._outputs.append(output)
        if output.finish is not None or output.error is not None:
            self._ended.set()

    async def all(self) -> list[Output]:
        """Its outputs, when it has ended. Raises the error with which it has."""
        await self._ended.wait()
        error = self._outputs[-1].error
        if error is not None:
            raise error
        return self._outputs


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model's directory. It neither truncates nor pads texts, whatever its file says.

    Raises:
        LockstepError: it is missing or cannot be read.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        raise refuse(f"model {path}: tokenizer.json is missing")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise refuse(f"model {path}: tokenizer.json cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
