"""The part of `docs/api.md` about the gRPC service: its methods and messages, with the comments of the proto file.

Compiled descriptors have no comments, so the file itself is read, one declaration a line as it is written there.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

PROTO = Path(__file__).resolve().parents[4] / "protos/lockstep/v1/inference.proto"

_BLOCK = re.compile(r"(service|message|enum|oneof) (\w+) \{(\})?$")
_METHOD = re.compile(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);")
_FIELD = re.compile(r"((?:optional |repeated )?(?:map<\w+, \w+>|\w+)) (\w+) = \d+;(?:\s*// (.*))?$")
_VALUE = re.compile(r"(\w+) = \d+;(?:\s*// (.*))?$")


def service(text: str | None = None) -> str:
    """Sections for the service's methods, its messages and enumerations.

    Args:
        text: of the proto file; None: the repository's own.

    Raises:
        ValueError: a line is none of the declarations that are known here.
    """
    text = PROTO.read_text() if text is None else text
    names = {name: kind for kind, name in re.findall(r"^(message|enum) (\w+)", text, re.MULTILINE)}
    return "\n".join(_sections(_lines(text), names))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each declaration with the comment lines above it."""
    comments: list[str] = []
    for line in (each.strip() for each in text.splitlines()):
        if line.startswith("//"):
            comments.append(line.removeprefix("//").strip())
            continue
        if line and not line.startswith(("syntax", "package", "reserved")):
            yield line, " ".join(comments)
        comments = []


def _sections(lines: Iterator[tuple[str, str]], names: Mapping[str, str]) -> Iterator[str]:
    choice = ""
    for line, comment in lines:
        if block := _BLOCK.match(line):
            kind, name, is_empty = block.groups()
            if kind == "oneof":
                choice = name
                continue
            yield from (f"### {kind} `{name}`", "", comment, "")
            if is_empty:
                yield from ("No fields.", "")
            else:
                yield from _header(kind)
        elif line == "}":
            if not choice:
                yield ""
            choice = ""
        elif method := _METHOD.match(line):
            name, request, stream, response = method.groups()
            answer = f"{'a stream of ' if stream else ''}{_linked(response, names)}"
            yield f"| `{name}` | {_linked(request, names)} | {answer} | {_cell(comment)} |"
        elif field := _FIELD.match(line):
            form, name, after = field.groups()
            words = " ".join(filter(None, (f"one of `{choice}`." if choice else "", comment, after)))
            yield f"| `{name}` | {_linked(form, names)} | {_cell(words)} |"
        elif value := _VALUE.match(line):
            yield f"| `{value[1]}` | {_cell(' '.join(filter(None, (comment, value[2]))))} |"
        else:
            raise ValueError(f"the proto file has a line of an unknown form: {line}")


def _header(kind: str) -> tuple[str, ...]:
    columns = {"service": ("method", "request", "answer", ""), "message": ("field", "form", "")}.get(
        kind, ("value", "")
    )
    return "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)


def _linked(form: str, names: Mapping[str, str]) -> str:
    """A form with a link to its section; `names` says what each name is."""
    *before, name = form.split(" ")
    if name not in names:
        return f"`{form}`" if "<" in form else form
    return " ".join([*before, f"[{name}](#{names[name]}-{name.lower()})"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
