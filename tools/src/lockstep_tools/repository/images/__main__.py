"""`python -m lockstep_tools.repository.images ACTION`: what `make wheels`, `images`, `push` and `model-image` run."""

import argparse
import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.repository.images import builders, catalog, kernel, locks, model, provenance, wheels

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
"""Runs in every new image: all imports of its code must work, except those of libraries in the first argument."""

_ROOT = Path(__file__).resolve().parents[5]
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
    """Allow one build at a time: all builds in this checkout share `build`.

    Raises:
        CommandError: another build is still running after deadline_s.
    """
    path.parent.mkdir(exist_ok=True)
    until, announced = time.monotonic() + deadline_s, False
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CommandError(f"another build in this checkout is not done ({path})", FAILED) from None
                if not announced:
                    print("waiting for another build in this checkout", file=sys.stderr, flush=True)
                    announced = True
                time.sleep(_TURN_POLL_S)
        yield


def fetch_wheels(options: argparse.Namespace) -> None:
    """Fill `build/wheels`."""
    for build in _builds(options):
        wheels.fetch(_ROOT, build)


def build_images(options: argparse.Namespace) -> None:
    """Fetch what is missing, build, try, and put each SBOM into `build/sbom`."""
    builds = _builds(options)
    if options.image and len(builds) != 1:
        raise CommandError("--image names one image, say which with --only", UNUSABLE)
    if options.kernels and options.variant != "cuda":
        raise CommandError("--kernels is for --variant cuda, other images have no GPU kernels", UNUSABLE)
    base = _base(options)
    builder = _builder_with(base)
    sboms = _ROOT / "build/sbom"
    sboms.mkdir(exist_ok=True)
    for build in builds:
        wheels.fetch(_ROOT, build)
        if "libs/engine/src" in catalog.needs(_ROOT, build.image).sources:
            kernel.build(_ROOT)
            kernel.build_gpu_module(_ROOT, build.variant)
        reference = options.image or build.reference(_LOCAL, catalog.version(_ROOT))
        recipe = builders.Recipe(_ROOT / build.image.project / "Dockerfile", _ROOT, build.stage)
        builder.build(recipe, reference, build_arguments(build, base, options.kernels))
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
    base = _base(options)
    builder = _builder_with(base)
    path = _ROOT / "build/models" / f"{options.name}.Dockerfile"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    builder.build(builders.Recipe(path, options.model, "release"), reference, {"BASE": base})
    if options.registry:
        target = model.reference(options.registry, options.name, options.tag)
        builder.push(reference, target)
        reference = target
    print(reference)


def build_arguments(build: catalog.Build, base: str, kernels: str = "") -> dict[str, str]:
    """The Dockerfile's arguments. `kernels` says which GPU kernels are compiled; nothing: all of the list."""
    arguments = {"BASE": base, "VERSION": catalog.version(_ROOT), **provenance.of(_ROOT)}
    arguments |= {"VARIANT": build.variant} if build.variant else {}
    return arguments | ({"KERNELS": kernels} if kernels and build.variant == "cuda" else {})


def _builds(options: argparse.Namespace) -> list[catalog.Build]:
    return catalog.select(options.only, options.variant, dev=options.dev)


def _base(options: argparse.Namespace) -> str:
    """The recorded base image, or the one that was asked for, with a line about it."""
    recorded = locks.read_base(_ROOT)
    if options.base and options.base != recorded:
        print(f"base image {options.base} instead of the recorded {recorded}", file=sys.stderr, flush=True)
    return options.base or recorded


def _builder_with(base: str) -> builders.Builder:
    """A builder that has the base image. The image is never pulled implicitly: a build needs no network."""
    builder = builders.choose()
    if not builder.has(base):
        raise CommandError(f"base image {base} is not here: pull it, or copy it from a mirror (docs/images.md)", FAILED)
    return builder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_tools.repository.images", description="Build the container images."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("--only", action="append", default=[], metavar="IMAGE", help=f"of {', '.join(catalog.IMAGES)}")
    which.add_argument("--variant", choices=catalog.VARIANTS, default="cpu", help="variant of the inference worker")
    which.add_argument("--dev", action="store_true", help="reload on a change of a source file, with debugpy")

    def add(name: str, run: object, summary: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=summary, description=summary, parents=parents)
        action.set_defaults(run=run)
        return action

    add("wheels", fetch_wheels, "fetch the wheels that the images install", which)
    build = add("build", build_images, "build the images", which)
    build.add_argument("--image", help="full name of the one image built, instead of its own")
    build.add_argument("--kernels", default="", help='GPU kernels to compile, as "--model llama-3.1-8b --arch 90"')
    push = add("push", push_images, "push the images to a registry", which)
    push.add_argument("--image", help="full name of the one image to push")
    packed = add("model", build_model, "build an image of a model's files")
    packed.add_argument("--model", type=Path, required=True, help="folder in the Hugging Face layout")
    packed.add_argument("--name", required=True, help="the image is lockstep/model-NAME")
    packed.add_argument("--tag", default="1", help="tag of the image")
    for action in (build, packed):
        action.add_argument("--base", help="base image instead of the recorded one, by tag or by digest")
    for action in (push, packed):
        action.add_argument("--registry", help="registry, such as registry.example/team")
    return parser


if __name__ == "__main__":
    sys.exit(main())
