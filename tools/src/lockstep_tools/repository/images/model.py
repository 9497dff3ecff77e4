"""A model as an image: its files at `/model`, on the base image, so that an init container can copy them with `cp`.

The Dockerfile is written here because each file of weights gets a layer of its own: registries limit the size of a
layer, layers are pulled side by side, and a new tokenizer does not send the weights again.
"""

import json
import re
from pathlib import Path

from lockstep_tools.failure import UNUSABLE, CommandError

_WEIGHTS = ".safetensors"


def reference(registry: str, name: str, tag: str) -> str:
    """The image's full name, such as `localhost:5000/lockstep/model-llama-3-8b:1`.

    Raises:
        CommandError: for a name or tag that no registry takes.
    """
    if not re.fullmatch(r"[a-z0-9]+([._-][a-z0-9]+)*", name):
        raise CommandError(f"NAME {name!r}: only a-z, 0-9, and . _ - between them", UNUSABLE)
    if not re.fullmatch(r"\w[\w.-]{0,127}", tag, re.ASCII):
        raise CommandError(f"TAG {tag!r}: only letters, digits, and . _ -", UNUSABLE)
    return f"{registry}/lockstep/model-{name}:{tag}"


def dockerfile(folder: Path, name: str, tag: str) -> str:
    """The Dockerfile for the model in this folder.

    Raises:
        CommandError: when the folder holds no model, or links to files elsewhere.
    """
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in files:
        if path.is_symlink():
            raise CommandError(f"MODEL: {path} is a link, copy the folder with `cp -rL` first", UNUSABLE)
    weights = [path.name for path in files if path.suffix == _WEIGHTS]
    others = [path.name for path in files if path.is_file() and path.suffix != _WEIGHTS]
    if "config.json" not in others or not weights:
        raise CommandError(f"MODEL: {folder} has no config.json, or no *{_WEIGHTS}", UNUSABLE)
    copies = [*([file, "/model/"] for file in weights), [*others, "/model/"]]
    return "\n".join(
        (
            "ARG BASE",
            "FROM ${BASE} AS release",
            *(f"COPY {json.dumps(copy)}" for copy in copies),
            "USER 10001:10001",
            f'LABEL org.opencontainers.image.title="lockstep/model-{name}" org.opencontainers.image.version="{tag}"',
            "",
        )
    )
