"""Docker or buildah, whichever works here: building, pushing, and running a command in an image."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep_tools.failure import FAILED, CommandError

FILE_TIME = 946684800
"""The time of every file in a layer (2000-01-01 UTC), so that a layer's digest depends on its content alone."""

_PROBE_TIMEOUT_S = 20


@dataclass(frozen=True)
class Recipe:
    """A stage of a Dockerfile, and the folder that its COPY commands read."""

    dockerfile: Path
    context: Path
    stage: str


class Builder(Protocol):
    """The operations of both tools."""

    def build(self, recipe: Recipe, reference: str, arguments: Mapping[str, str]) -> None:
        """Build an image and name it."""

    def push(self, reference: str, target: str) -> None:
        """Push a local image under another name."""

    def run(self, reference: str, command: list[str]) -> None:
        """Run a command in a local image; it has to succeed."""

    def copy(self, reference: str, path: str, folder: Path) -> None:
        """Copy a file of a local image into a folder."""

    def has(self, reference: str) -> bool:
        """Whether the image is in local storage."""


class Buildah:
    """buildah, without a daemon; layers are kept for the next build and have fixed file times."""

    def build(self, recipe: Recipe, reference: str, arguments: Mapping[str, str]) -> None:
        """Build an image and name it."""
        command = ["buildah", "build", "--layers", "--isolation", "chroot", "--pull-never", "--format", "oci"]
        command += ["--timestamp", str(FILE_TIME), "--file", str(recipe.dockerfile), "--tag", reference]
        command += ["--target", recipe.stage]
        run_program(
            [*command, *_build_arguments(arguments), str(recipe.context)], f"buildah could not build {reference}"
        )

    def push(self, reference: str, target: str) -> None:
        """Push a local image under another name; plain HTTP for a registry on this machine."""
        verify = "false" if is_local(target) else "true"
        command = ["buildah", "push", "--quiet", f"--tls-verify={verify}", reference, f"docker://{target}"]
        run_program(command, f"buildah could not push {target}")

    def run(self, reference: str, command: list[str]) -> None:
        """Run a command in a local image; it has to succeed."""
        with self._container(reference) as container:
            read_program(["buildah", "run", "--isolation", "chroot", container, "--", *command])

    def copy(self, reference: str, path: str, folder: Path) -> None:
        """Copy a file of a local image into a folder."""
        # Not with `cat`: `buildah run` may lose the end of an output.
        command = ["buildah", "run", "--isolation", "chroot", "--user", "root", "--volume", f"{folder}:/mnt"]
        with self._container(reference) as container:
            read_program([*command, container, "--", "cp", path, "/mnt/"])

    @contextmanager
    def _container(self, reference: str) -> Iterator[str]:
        container = read_program(["buildah", "from", "--pull-never", reference]).strip()
        try:
            yield container
        finally:
            read_program(["buildah", "rm", container])

    def has(self, reference: str) -> bool:
        """Whether the image is in local storage."""
        return succeeds(["buildah", "inspect", "--type", "image", reference])


class Docker:
    """Docker with BuildKit, which also keeps layers and gives their files fixed times."""

    def build(self, recipe: Recipe, reference: str, arguments: Mapping[str, str]) -> None:
        """Build an image and name it."""
        command = ["docker", "buildx", "build", "--pull=false", "--network=none", "--provenance=false"]
        command += ["--build-arg", f"SOURCE_DATE_EPOCH={FILE_TIME}"]
        command += [
            "--output",
            f"type=docker,name={reference},rewrite-timestamp=true",
            "--file",
            str(recipe.dockerfile),
        ]
        command += ["--target", recipe.stage]
        run_program(
            [*command, *_build_arguments(arguments), str(recipe.context)], f"docker could not build {reference}"
        )

    def push(self, reference: str, target: str) -> None:
        """Push a local image under another name."""
        run_program(["docker", "tag", reference, target], f"docker could not name {target}")
        run_program(["docker", "push", "--quiet", target], f"docker could not push {target}")

    def run(self, reference: str, command: list[str]) -> None:
        """Run a command in a local image; it has to succeed."""
        read_program(["docker", "run", "--rm", "--network=none", "--entrypoint", command[0], reference, *command[1:]])

    def copy(self, reference: str, path: str, folder: Path) -> None:
        """Copy a file of a local image into a folder."""
        container = read_program(["docker", "create", reference]).strip()
        try:
            read_program(["docker", "cp", f"{container}:{path}", f"{folder}/"])
        finally:
            read_program(["docker", "rm", container])

    def has(self, reference: str) -> bool:
        """Whether the image is in local storage."""
        return succeeds(["docker", "image", "inspect", reference])


def choose() -> Builder:
    """Docker if its daemon answers, else buildah.

    Raises:
        CommandError: when neither works.
    """
    if shutil.which("docker") and succeeds(["docker", "info"]):
        return Docker()
    if shutil.which("buildah"):
        return Buildah()
    raise CommandError(
        "neither docker (with a running daemon) nor buildah is here, one of them builds the images", FAILED
    )


def is_local(reference: str) -> bool:
    """Whether an image's registry is on this machine."""
    host = reference.partition("/")[0].partition(":")[0]
    return host == "localhost" or host.startswith("127.")


def _build_arguments(arguments: Mapping[str, str]) -> list[str]:
    return [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]


def run_program(command: list[str], failure: str) -> None:
    """Run a program whose messages go to the terminal; `failure` is the error if it fails."""
    if subprocess.run(command, check=False).returncode:
        raise CommandError(f"{failure}, its own message is above", FAILED)


def read_program(command: list[str]) -> str:
    """What a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"`{' '.join(command[:2])}` failed: {done.stderr.strip()[-300:]}", FAILED)
    return done.stdout


def succeeds(command: list[str]) -> bool:
    """Whether a program ends with 0, in time."""
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
