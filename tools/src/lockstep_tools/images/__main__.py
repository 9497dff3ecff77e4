"""`python -m lockstep_tools.images ACTION`: what `make wheels`, `images`, `push` and `model-image` run."""

import argparse
import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.images import builders, catalog, kernel, model, provenance, wheels

DEFAULT_BASE = "docker.io/library/python:3.11-slim-bookworm"

IMPORT_ALL = """\
import importlib, pkgutil, sys
for named in map(importlib.import_module, sys.argv[2:]):
    for module in pkgutil.walk_packages(getattr(named, "__path__", ()), named.__name__ + "."):
        if not module.name.rpartition(".")[2].startswith("_"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name not in sys.argv[1].split(","):
                    raise
"""
"""Run in every new image: whatever its code imports has to be there, but for the libraries in the first argument."""

_ROOT = Path(__file__).resolve().parents[4]
_LOCAL = "localhost"
_TURN_DEADLINE_S = 1800
_TURN_POLL_S = 0.2


def main(arguments: list[str] | None = None) -> int:
    """Run one action; the exit code is that of `lockstep`'s commands."""
    options = _parser().parse_args(arguments)
    try:
        with turn(_ROOT / "build/images.lock", _TURN_DEADLINE_S):
            options.run(options)
    except CommandError as error:
        print(f"images: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


@contextmanager
def turn(path: Path, deadline_s: float) -> Iterator[None]:
    """One at a time: `build` is shared by all who build in this checkout.

    Raises:
        CommandError: when another is still at it after deadline_s.
    """
    path.parent.mkdir(exist_ok=True)
    until, told = time.monotonic() + deadline_s, False
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CommandError(f"another build in this checkout is not done ({path})", FAILED) from None
                if not told:
                    print("waiting for another build in this checkout", file=sys.stderr, flush=True)
                    told = True
                time.sleep(_TURN_POLL_S)
        yield


def fetch_wheels(options: argparse.Namespace) -> None:
    """Fill `build/wheels`."""
    for build in _builds(options):
        wheels.fetch(_ROOT, build)


def lock_cuda(options: argparse.Namespace) -> None:  # noqa: ARG001 - an action like the others
    """Write what the CUDA build of torch needs beyond the lock file."""
    wheels.lock_cuda(_ROOT)


def build_images(options: argparse.Namespace) -> None:
    """Fetch what is missing, build, try, and put each SBOM into `build/sbom`."""
    builds = _builds(options)
    if options.image and len(builds) != 1:
        raise CommandError("--image names one image, say which with --only", UNUSABLE)
    builder = _builder_with(options.base)
    sboms = _ROOT / "build/sbom"
    sboms.mkdir(exist_ok=True)
    for build in builds:
        wheels.fetch(_ROOT, build)
        if "libs/engine/src" in catalog.needs(_ROOT, build.image).sources:
            kernel.build(_ROOT)
        reference = options.image or build.reference(_LOCAL, catalog.version(_ROOT))
        recipe = builders.Recipe(_ROOT / build.image.project / "Dockerfile", _ROOT, build.stage)
        builder.build(recipe, reference, build_arguments(build, options.base))
        builder.run(reference, ["python", "-c", IMPORT_ALL, ",".join(build.absent), *build.image.imports])
        builder.copy(reference, f"/usr/share/sbom/{build.name}.cdx.json", sboms)
        print(reference, flush=True)


def push_images(options: argparse.Namespace) -> None:
    """Push what was built: everything to a registry, or one image by its full name."""
    builder = builders.choose()
    if options.image:
        builder.push(options.image, options.image)
        return
    if not options.registry:
        raise CommandError("push: a registry is needed, such as REGISTRY=registry.example/team", UNUSABLE)
    for build in _builds(options):
        reference = build.reference(_LOCAL, catalog.version(_ROOT))
        if not builder.has(reference):
            raise CommandError(f"{reference} is not built yet, `make images` does it", FAILED)
        target = build.reference(options.registry, catalog.version(_ROOT))
        builder.push(reference, target)
        print(target, flush=True)


def build_model(options: argparse.Namespace) -> None:
    """Build the image of a model, and push it where a registry is given."""
    reference = model.reference(_LOCAL, options.name, options.tag)
    text = model.dockerfile(options.model, options.name, options.tag)
    builder = _builder_with(options.base)
    path = _ROOT / "build/models" / f"{options.name}.Dockerfile"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    builder.build(builders.Recipe(path, options.model, "release"), reference, {"BASE": options.base})
    if options.registry:
        target = model.reference(options.registry, options.name, options.tag)
        builder.push(reference, target)
        reference = target
    print(reference)


def build_arguments(build: catalog.Build, base: str) -> dict[str, str]:
    """The Dockerfile's arguments."""
    arguments = {"BASE": base, "VERSION": catalog.version(_ROOT), **provenance.of(_ROOT)}
    return arguments | ({"VARIANT": build.variant} if build.variant else {})


def _builds(options: argparse.Namespace) -> list[catalog.Build]:
    return catalog.select(options.only, options.variant, dev=options.dev)


def _builder_with(base: str) -> builders.Builder:
    """A builder that has the base image. It is never pulled behind the user's back: a build needs no network."""
    builder = builders.choose()
    if not builder.has(base):
        raise CommandError(f"base image {base} is not here: pull it, or copy it from a mirror (docs/images.md)", FAILED)
    return builder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lockstep_tools.images", description="Build the container images.")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("--only", action="append", default=[], metavar="IMAGE", help=f"of {', '.join(catalog.IMAGES)}")
    which.add_argument("--variant", choices=catalog.VARIANTS, default="cpu", help="of the inference worker")
    which.add_argument("--dev", action="store_true", help="reload on a change of a source file, with debugpy")

    def add(name: str, run: object, summary: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=summary, description=summary, parents=parents)
        action.set_defaults(run=run)
        return action

    add("wheels", fetch_wheels, "fetch the wheels that the images install", which)
    add("lock-cuda", lock_cuda, "write requirements-cuda.lock")
    build = add("build", build_images, "build the images", which)
    build.add_argument("--image", help="full name of the one image built, instead of its own")
    push = add("push", push_images, "push the images to a registry", which)
    push.add_argument("--image", help="full name of the one image to push")
    packed = add("model", build_model, "build an image of a model's files")
    packed.add_argument("--model", type=Path, required=True, help="folder in the Hugging Face layout")
    packed.add_argument("--name", required=True, help="the image is lockstep/model-NAME")
    packed.add_argument("--tag", default="1", help="of the image")
    for action in (build, packed):
        action.add_argument("--base", default=DEFAULT_BASE, help="base image, by tag or by digest")
    for action in (push, packed):
        action.add_argument("--registry", help="such as registry.example/team")
    return parser


if __name__ == "__main__":
    sys.exit(main())
