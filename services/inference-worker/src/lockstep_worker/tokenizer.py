"""The files of a model's tokenizer, read once and sent to routers. The worker itself never tokenizes."""

import hashlib
import json
import logging
from pathlib import Path

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import LockstepError, invalid
from tokenizers import Tokenizer

logger = logging.getLogger("lockstep.worker")

_MAX_REASON_CHARS = 200


def load_tokenizer(directory: Path) -> worker_pb2.TokenizerFiles:
    """Read tokenizer, its configuration and the chat template of the model in `directory`.

    The template is that of `chat_template.jinja`, else that of `tokenizer_config.json`; of several named ones, the one
    named `default`. The digest is SHA-256 over the three parts in the message's order. Each part is preceded by its
    length as 8 bytes, most significant first. A template that routers cannot compile is logged: they serve the model
    without it.

    Raises:
        LockstepError: INVALID_REQUEST for a missing or broken file.
    """
    tokenizer = _read(directory / "tokenizer.json")
    if tokenizer is None:
        raise _refuse(directory, "tokenizer.json is missing (models without a fast tokenizer are not served)")
    _check(directory, tokenizer)
    config = _read(directory / "tokenizer_config.json")
    settings = _parse(directory, "tokenizer_config.json", config) if config else {}
    template = _chat_template(directory, settings)
    _check_template(directory, template)
    digest = hashlib.sha256()
    for part in (tokenizer, config or b"", template.encode()):
        digest.update(len(part).to_bytes(8) + part)
    return worker_pb2.TokenizerFiles(
        digest=digest.hexdigest(),
        tokenizer_json=tokenizer,
        tokenizer_config_json=config or b"",
        chat_template=template,
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refuse(path.parent, f"{path.name} cannot be read: {error.strerror}") from None


def _check(directory: Path, tokenizer: bytes) -> None:
    """Raise INVALID_REQUEST for a file from which routers could not build the tokenizer: operators see errors here."""
    _parse(directory, "tokenizer.json", tokenizer)
    try:
        Tokenizer.from_buffer(tokenizer)
    except Exception as error:  # the library raises plain Exception
        sentence = str(error).partition("\n")[0][:_MAX_REASON_CHARS]
        raise _refuse(directory, f"tokenizer.json is no tokenizer: {sentence}") from None


def _parse(directory: Path, name: str, content: bytes) -> dict[str, object]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise _refuse(directory, f"{name} is not complete JSON: {error}") from None
    if not isinstance(value, dict):
        raise _refuse(directory, f"{name} is not a JSON object")
    return value


def _chat_template(directory: Path, settings: dict[str, object]) -> str:
    file = _read(directory / "chat_template.jinja")
    if file is not None:
        try:
            return file.decode()
        except UnicodeDecodeError:
            raise _refuse(directory, "chat_template.jinja is not UTF-8") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _check_template(directory: Path, template: str) -> None:
    try:
        _TemplateEnvironment(extensions=[loopcontrols, _GenerationBlock]).compile(template)
    except Exception as error:  # Jinja compiles to Python, which may refuse the result in any way
        sentence = str(error).partition("\n")[0][:_MAX_REASON_CHARS]
        logger.error("%s: its chat template cannot be compiled: %s; it takes no conversations", directory, sentence)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    # Jinja computes constants as it compiles, but not with these operators, which make large values of small ones.
    intercepted_binops = frozenset({"*", "**", "%"})


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which transformers and the router know beside Jinja's own blocks."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's content."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _refuse(directory: Path, sentence: str) -> LockstepError:
    return invalid("model", f"{directory}: {sentence}")
