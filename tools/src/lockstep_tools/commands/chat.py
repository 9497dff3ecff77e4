"""`lockstep chat`: a streaming conversation in the terminal with any OpenAI endpoint; answers survive dying routers."""

import argparse
import asyncio
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lockstep_client import (
    AsyncLockstepClient,
    ConnectionFailedError,
    Event,
    Finish,
    LockstepError,
    Policy,
    ReasoningPiece,
    TextPiece,
    Usage,
)
from rich.console import Console
from rich.text import Text

from lockstep_tools import console
from lockstep_tools.arguments import DEFAULT_URL, add_endpoints, api_key, integer, real, unicode
from lockstep_tools.escaping import harmless_lines
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.load.endpoint import PROXY_ERRORS, checked_url, tls_context, unusable_proxy

DESCRIPTION = """\
Talk to a model. Ctrl-C stops an answer, Ctrl-D or /quit ends, /reset begins a new conversation.
Without a terminal each line of stdin is a message, only the answers are printed, and Ctrl-C ends.
Of several routers another one continues the answer when one dies."""

EXAMPLES = """\
  lockstep chat
  lockstep chat --system 'Answer in one sentence.' --temperature 0
  lockstep chat --url http://router-a:8000/v1,http://router-b:8000/v1
  echo 'It was a dark night, and' | lockstep chat --max-tokens 40"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_endpoints(parser)
    parser.add_argument("--system", type=unicode, metavar="TEXT", help="instructions that begin the conversation")
    parser.add_argument("--temperature", type=real(0, 2), metavar="T", help="0 is greedy (default: the server's)")
    parser.add_argument(
        "--max-tokens", type=integer(1), default=512, metavar="N", help="limit of an answer (default: 512)"
    )
    parser.add_argument("--seed", type=integer(0), metavar="N")


def run(arguments: argparse.Namespace) -> int:
    """Talk until the end of input."""
    urls = [checked_url(url) for url in arguments.url or [f"{DEFAULT_URL}/v1"]]
    with asyncio.Runner() as runner:
        model = arguments.model or runner.run(_first_model(arguments, urls))
        client = _client(arguments, urls, Policy(timeout_s=None))
        try:
            return Chat(arguments, urls, model, client, runner).run()
        finally:
            runner.run(client.aclose())


def _client(arguments: argparse.Namespace, urls: Sequence[str], policy: Policy) -> AsyncLockstepClient:
    """A client of all these servers.

    Raises:
        CommandError: an option cannot be used.
    """
    key, verify = api_key(arguments.api_key_env) or "", tls_context(arguments) or True
    try:
        return AsyncLockstepClient(urls, api_key=key, policy=policy, verify=verify)
    except ValueError as error:
        raise CommandError(f"--url, --api-key-env: {error}", UNUSABLE) from None
    except PROXY_ERRORS as error:
        raise unusable_proxy(error) from None


async def _first_model(arguments: argparse.Namespace, urls: Sequence[str]) -> str:
    """The first model that a server lists. Each is asked once: one that is not there is not waited for.

    Raises:
        CommandError: no server answers, or it lists none.
    """
    names = ", ".join(urls)
    try:
        async with _client(arguments, urls, Policy(timeout_s=60.0, retries=0)) as client:
            models = await client.models()
    except ConnectionFailedError as error:
        sentence = f"no server answers at {names} ({error.message}): start one with `lockstep serve`"
        raise CommandError(sentence, UNUSABLE) from None
    except LockstepError as error:
        raise CommandError(error.message, UNUSABLE) from None
    if not models:
        raise CommandError(f"{names} lists no model", UNUSABLE)
    return models[0].id


class Chat:
    """One terminal's conversation."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        urls: Sequence[str],
        model: str,
        client: AsyncLockstepClient,
        runner: asyncio.Runner,
    ) -> None:
        self._model = model
        self._urls = urls
        self._options: dict[str, Any] = {
            name: value
            for name in ("temperature", "max_tokens", "seed")
            if (value := getattr(arguments, name)) is not None
        }
        self._opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
        self._client = client
        self._runner = runner
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._notes = console.notes()
        self._out = console.output()
        self._failed = False
        self._reset()

    def run(self) -> int:
        """Read messages and stream answers. Returns 1 when an answer failed and there is no terminal to show it on."""
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401, PLC0415 - gives input() its line editing
            self._remark(f"{self._model} at {', '.join(self._urls)}: /reset begins again, Ctrl-D ends")
        while (message := self._read()) is not None:
            if message == "/quit":
                break
            if message == "/reset":
                self._reset()
                self._remark("a new conversation")
            elif message:
                self._turn(message)
        return FAILED if self._failed and not self._interactive else 0

    def _reset(self) -> None:
        self._messages: list[dict[str, str]] = list(self._opening)
        # The router keeps a session on one worker, whose prefix cache then holds the conversation.
        self._session = uuid.uuid4().hex

    def _read(self) -> str | None:
        """The next message; None at the end of input."""
        while True:
            try:
                return input(_prompt(self._notes) if self._interactive else "").strip()
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print()
                self._remark("Ctrl-D or /quit ends")

    def _turn(self, message: str) -> None:
        self._messages.append({"role": "user", "content": message})
        answer = _Answer()
        try:
            self._runner.run(self._stream(answer))
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            print()
            self._remark("stopped")
        except LockstepError as error:
            self._failed = True
            print(flush=True)
            self._notes.print(harmless_lines(error.message), style="red", markup=False)
        else:
            print(flush=True)
            self._remark(answer.summary())
        if answer.text:
            self._messages.append({"role": "assistant", "content": _encodable(answer.text)})
        else:
            self._messages.pop()

    async def _stream(self, answer: "_Answer") -> None:
        asked = self._client.chat(
            self._messages, model=self._model, stream=True, session=self._session, **self._options
        )
        async with await asked as events:
            async for event in events:
                if isinstance(event, ReasoningPiece):
                    self._show_reasoning(event.text)
                elif isinstance(event, TextPiece):
                    # The answer begins below the reasoning, if that is shown.
                    gap = "\n\n" if self._interactive and answer.reasons and not answer.text else ""
                    print(gap + console.generated(event.text, sys.stdout), end="", flush=True)
                answer.add(event)

    def _show_reasoning(self, text: str) -> None:
        """Dimmed, on a terminal only: elsewhere stdout has the answers alone."""
        if self._interactive:
            shown = Text(console.generated(text, sys.stdout), style="dim")
            self._out.print(shown, end="", soft_wrap=True)

    def _remark(self, text: str) -> None:
        if self._interactive:
            self._notes.print(harmless_lines(text), style="dim", markup=False)


class _Answer:
    """The pieces of the answer as they arrive."""

    def __init__(self) -> None:
        self.text = ""
        self.reasons = False
        """It has begun with reasoning."""
        self._began_s = time.monotonic()
        self._first_s: float | None = None
        self._tokens: int | None = None
        self._finish: str | None = None

    def add(self, event: Event) -> None:
        match event:
            case TextPiece() | ReasoningPiece():
                if isinstance(event, TextPiece):
                    self.text += event.text
                else:
                    self.reasons = True
                if self._first_s is None:
                    self._first_s = time.monotonic()
            case Usage():
                self._tokens = event.completion_tokens
            case Finish():
                self._finish = event.reason

    def summary(self) -> str:
        """Tokens, speed, and whether the answer was cut."""
        parts = []
        if self._first_s is not None:
            parts.append(f"first token after {(self._first_s - self._began_s) * 1e3:.0f} ms")
            seconds = time.monotonic() - self._first_s
            if self._tokens and seconds > 0:
                parts.insert(0, f"{self._tokens} tokens, {self._tokens / seconds:.0f} tokens/s")
        if self._finish == "length":
            parts.append("cut at --max-tokens")
        return "; ".join(parts)


def _encodable(text: str) -> str:
    """The text without lone surrogates, which a server's JSON may have and no request can."""
    return text.encode(errors="replace").decode()


def _prompt(notes: Console) -> str:
    """The coloured prompt; readline takes what is between the control characters 1 and 2 as having no width."""
    is_coloured = notes.color_system and not notes.no_color
    return "\001\x1b[1;36m\002> \001\x1b[0m\002" if is_coloured else "> "
