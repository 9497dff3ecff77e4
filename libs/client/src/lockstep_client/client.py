"""The blocking client."""

import ssl
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, Unpack, overload

from lockstep_client.errors import LockstepError, ProtocolError, Received
from lockstep_client.events import (
    Answer,
    Embeddings,
    Event,
    Model,
    Tokens,
    answer_of,
    embeddings_of,
    models_of,
    tokens_of,
)
from lockstep_client.fields import ChatFields, CompletionFields, Message, Prompt
from lockstep_client.policy import OnLost, Policy
from lockstep_client.requests import Requests, object_of, parse_event
from lockstep_client.steps import Outgoing
from lockstep_client.transport import Reply, Transport


class Stream:
    """The events of an answer. Iterate over it once; leaving the loop or the `with` block early cancels the answer."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    @property
    def received(self) -> Received:
        """What has come so far."""
        return self._reply.received

    def __iter__(self) -> Generator[Event, None, None]:
        """The events as they come, each once, whatever happens to routers meanwhile.

        Raises:
            LockstepError: the answer cannot be completed; `received` has what came before.
        """
        try:
            for item in self._reply:
                if isinstance(item, bytes):
                    raise ProtocolError("the server does not stream")
                parsed = parse_event(item)
                if isinstance(parsed, LockstepError):
                    parsed.received = self.received
                    raise parsed
                yield from parsed or ()
        finally:
            self.close()

    def close(self) -> None:
        """Leave the answer; the router ends it if it still runs."""
        self._reply.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LockstepClient:
    """A client of several routers that serve the same models. Several threads may use it."""

    def __init__(
        self,
        base_urls: str | Iterable[str],
        *,
        api_key: str | None = None,
        policy: Policy | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        """Connect to nothing yet.

        Args:
            base_urls: of the routers, with or without /v1; a name with several addresses is several routers.
            api_key: default: the environment variable LOCKSTEP_API_KEY, if it is set.
            policy: limits of each request.
            verify: TLS settings; True: the system's authorities are trusted.

        Raises:
            ValueError: an argument cannot be used.
        """
        self._requests = Requests(base_urls, api_key, policy or Policy())
        self._transport = Transport(self._requests.base_urls, self._requests.policy, verify=verify)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str,
        stream: Literal[False] = False,
        session: str | None = None,
        timeout_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
        **fields: Unpack[ChatFields],
    ) -> Answer: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str,
        stream: Literal[True],
        session: str | None = None,
        timeout_s: float | None = None,
        on_lost: OnLost | None = None,
        extra: Mapping[str, Any] | None = None,
        **fields: Unpack[ChatFields],
    ) -> Stream: ...
    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str,
        stream: bool = False,
        session: str | None = None,
        timeout_s: float | None = None,
        on_lost: OnLost | None = None,
        extra: Mapping[str, Any] | None = None,
        **fields: Unpack[ChatFields],
    ) -> Answer | Stream:
        """Answer a conversation.

        Args:
            messages: the conversation.
            model: its name.
            stream: give events as they come, instead of the whole answer.
            session: requests of one session go to one worker, whose prefix cache has the conversation. Printable ASCII
                characters.
            timeout_s: for the whole request, instead of the policy's.
            on_lost: instead of the policy's.
            extra: further fields of the body.
            **fields: OpenAI's, and those that routers take besides.

        Raises:
            LockstepError: there is no answer.
        """
        body = {"model": model, "messages": list(messages), **fields}
        request = self._requests.generate("/v1/chat/completions", body, stream=stream, session=session, extra=extra)
        return self._answer(request, timeout_s, on_lost, stream=stream)

    @overload
    def complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        stream: Literal[False] = False,
        session: str | None = None,
        timeout_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
        **fields: Unpack[CompletionFields],
    ) -> Answer: ...
    @overload
    def complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        stream: Literal[True],
        session: str | None = None,
        timeout_s: float | None = None,
        on_lost: OnLost | None = None,
        extra: Mapping[str, Any] | None = None,
        **fields: Unpack[CompletionFields],
    ) -> Stream: ...
    def complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        stream: bool = False,
        session: str | None = None,
        timeout_s: float | None = None,
        on_lost: OnLost | None = None,
        extra: Mapping[str, Any] | None = None,
        **fields: Unpack[CompletionFields],
    ) -> Answer | Stream:
        """Continue a text or token ids; the arguments are those of `chat`.

        Raises:
            LockstepError: there is no answer.
        """
        body = {"model": model, "prompt": prompt, **fields}
        request = self._requests.generate("/v1/completions", body, stream=stream, session=session, extra=extra)
        return self._answer(request, timeout_s, on_lost, stream=stream)

    def embed(
        self,
        input: Prompt,  # noqa: A002 - OpenAI's name, by which routers refuse it
        *,
        model: str,
        dimensions: int | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """The vectors of texts. The request changes nothing: when a router dies, another one is asked.

        Args:
            input: a text, token ids, or a list of either.
            model: its name; its workers must give embeddings.
            dimensions: the numbers of each vector, one of the sizes that the model offers; None: all that it gives.
            user: requests of one user go to one worker.
            timeout_s: for the whole request, instead of the policy's.

        Returns:
            A vector for each text, in their order, of `dimensions` numbers.

        Raises:
            LockstepError: they cannot be had. `InvalidRequestError` names the field, as `input[1]` if that text is too
                long for the model; `NotFoundError` means that there is no such model.
        """
        request = self._requests.embed(input, model, dimensions, user)
        return embeddings_of(self._object(request, timeout_s))

    def models(self) -> list[Model]:
        """The models that the routers serve.

        Raises:
            LockstepError: no router answers.
        """
        return models_of(self._object(self._requests.get("/v1/models")))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        model: str,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
    ) -> Tokens:
        """The token ids of a text or of a conversation.

        Raises:
            LockstepError: they cannot be had.
        """
        body = {"model": model, "prompt": prompt, "messages": messages, "add_special_tokens": add_special_tokens}
        return tokens_of(self._object(self._requests.post("/tokenize", body)))

    def detokenize(self, tokens: Sequence[int], *, model: str) -> str:
        """The text of token ids.

        Raises:
            LockstepError: it cannot be had.
        """
        body = {"model": model, "tokens": list(tokens)}
        return str(self._object(self._requests.post("/detokenize", body)).get("prompt"))

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self, request: Outgoing, timeout_s: float | None, on_lost: OnLost | None, *, stream: bool
    ) -> Answer | Stream:
        reply = self._transport.send(request, self._requests.limits(timeout_s, on_lost))
        if stream and reply.head.status < 400:
            return Stream(reply)
        return answer_of(_read(reply))

    def _object(self, request: Outgoing, timeout_s: float | None = None) -> dict[str, Any]:
        return _read(self._transport.send(request, self._requests.limits(timeout_s, None)))


def _read(reply: Reply) -> dict[str, Any]:
    return object_of(reply.head, b"".join(item for item in reply if isinstance(item, bytes)))
