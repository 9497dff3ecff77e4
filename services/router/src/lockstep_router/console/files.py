"""The files of the console's page. They are read once, so that a request's path is only ever a key of a table.

The page loads nothing from elsewhere and has no script or style of its own in the markup, so its policy forbids both;
with it, a browser runs nothing that an answer of a model might smuggle into the page.
"""

import functools
import hashlib
from collections.abc import Mapping
from importlib import resources

from lockstep_common.answers import Answer

ROOT = "/console/"
STATE = "/console/state"
"""Where the page asks for what it shows."""
ROUTER = "/console/router"
"""Where other routers ask for the facts about this one."""
ROUTE = "/console/{name:path}"
"""The console's route on the public port, in metrics and logs."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"


@functools.cache
def of(console: str) -> Mapping[str, Answer]:
    """The answers by their paths for a value of the setting `console`; none if it is `off`."""
    return {} if console == "off" else _load()


@functools.cache
def _load() -> Mapping[str, Answer]:
    folder = resources.files(__package__) / "static"
    pages = {ROOT + file.name: _answer(file.name, file.read_bytes()) for file in folder.iterdir() if file.is_file()}
    pages[ROOT] = pages.pop(ROOT + _INDEX)
    # Relative, so that it is right behind a proxy that adds a prefix to the path.
    pages[ROOT.rstrip("/")] = Answer(308, "text/plain; charset=utf-8", b"", (("Location", "console/"),))
    return pages


def _answer(name: str, content: bytes) -> Answer:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    # Browsers ask each time whether the file is still the same: a new router's page never runs with an old script.
    caching = (("Cache-Control", "no-cache"), ("ETag", tag))
    return Answer(200, _TYPES[name[name.rindex(".") :]], content, caching + SECURITY_HEADERS)
