"""Documents of which some parts are generated. Such a part stands between `<!-- NAME -->` and `<!-- end of NAME -->`;
the rest is written by hand.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path


def fill(text: str, parts: Mapping[str, str]) -> str:
    """The document with its generated parts replaced."""
    for name, part in parts.items():
        found = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = found.sub(partial(_replace, part), text)
    return text


def _replace(part: str, found: re.Match[str]) -> str:
    return f"{found[1]}\n{part}\n{found[2]}"


def write_or_check(document: Path, complete: Callable[[str], str], module: str) -> None:
    """Write the document; with `--check` on the command line, end the process with an error if it is out of date.

    Args:
        document: the file.
        complete: makes the up-to-date text from the one that is there.
        module: the command that writes it.
    """
    parser = argparse.ArgumentParser(description=f"Write the generated parts of {document.name}.")
    parser.add_argument("--check", action="store_true", help="fail if they differ from what stands there")
    arguments = parser.parse_args()
    before = document.read_text()
    after = complete(before)
    if not arguments.check:
        document.write_text(after)
    elif after != before:
        sys.exit(f"{document.name} is not what the code says; run: python -m {module}")
