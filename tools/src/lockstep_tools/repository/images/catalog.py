"""The images, their names, and what each needs: its projects' sources and third-party requirements.

The one source of truth is each project's `pyproject.toml`; a dependency added there is in the next image.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from lockstep_tools.failure import UNUSABLE, CommandError

VARIANTS = ("cpu", "cuda")
"""Builds of torch. Only the inference worker has them."""

DEV_REQUIREMENTS = ("debugpy", "watchfiles")
"""Requirements that `DEV=1` adds: reload on a change of a source file, and a debugger."""

_PROJECT_FOLDERS = (
    "libs/api",
    "libs/common",
    "libs/client",
    "libs/engine",
    "services/router",
    "services/inference-worker",
    "services/kv-state-server",
    "tools",
)

_SERVED_COMMANDS = (
    *(f"lockstep_tools.commands.{name}" for name in ("bench", "chaos", "chat", "check", "load", "status")),
    "lockstep_tools.chaos",
    "lockstep_tools.load",
)
"""The commands for a served system; the others need the engine and are not for the tools image."""


@dataclass(frozen=True)
class Image:
    """An image: `project` is the folder whose package it runs and whose Dockerfile makes it.

    `imports` names packages and modules that must be importable in the finished image, packages with all they contain.

    `unused` names distributions that a requirement asks for and this image never imports; what only they ask for
    stays out with them.

    `cuda_only` names libraries that only images with torch's CUDA build have; what imports them is of no use elsewhere.
    """

    name: str
    project: str
    imports: tuple[str, ...]
    unused: tuple[str, ...] = ()
    cuda_only: tuple[str, ...] = ()
    has_variants: bool = False
    has_dev: bool = True


IMAGES = {
    image.name: image
    for image in (
        # `tokenizers` requires the hub's client to download tokenizers; the router gets them from its workers.
        Image(
            "router", "services/router", ("lockstep_router", "lockstep_common", "lockstep_api"), ("huggingface-hub",)
        ),
        Image(
            "inference-worker",
            "services/inference-worker",
            ("lockstep_worker", "lockstep_engine", "lockstep_common", "lockstep_api"),
            cuda_only=("triton", "nvidia-ml-py"),
            has_variants=True,
        ),
        # Of `lockstep_common` what it imports: it does not call Kubernetes, and has no client for that.
        Image("kv-state-server", "services/kv-state-server", ("lockstep_state", "lockstep_api")),
        Image("tools", "tools", _SERVED_COMMANDS, has_dev=False),
    )
}


@dataclass(frozen=True)
class Build:
    """One image to build: the variant is None where the image has none."""

    image: Image
    variant: str | None
    dev: bool = False

    @property
    def name(self) -> str:
        """The image with its variant: what its wheels' folder and its SBOM are called."""
        return "-".join(filter(None, (self.image.name, self.variant)))

    @property
    def absent(self) -> tuple[str, ...]:
        """Libraries that this build leaves out."""
        return () if self.variant == "cuda" else self.image.cuda_only

    @property
    def stage(self) -> str:
        """The last stage of the Dockerfile to build."""
        return "dev" if self.dev else "release"

    def reference(self, registry: str, version: str) -> str:
        """Its full name, such as `localhost:5000/lockstep/inference-worker:0.1.0-cpu`."""
        tag = "-".join(filter(None, (version, self.variant, "dev" if self.dev else None)))
        return f"{registry}/lockstep/{self.image.name}:{tag}"


def select(names: list[str], variant: str, *, dev: bool) -> list[Build]:
    """The builds of these images, of all when no name is given.

    Raises:
        CommandError: for a name that is not an image.
    """
    for name in names:
        if name not in IMAGES:
            raise CommandError(f"image {name!r}: there are only {', '.join(IMAGES)}", UNUSABLE)
    images = [IMAGES[name] for name in names or IMAGES]
    return [Build(image, variant if image.has_variants else None, dev and image.has_dev) for image in images]


@dataclass(frozen=True)
class Needs:
    """What an image is made of: source folders (relative to the repository), and requirements as pip takes them."""

    sources: tuple[str, ...]
    requirements: tuple[str, ...]


def needs(root: Path, image: Image) -> Needs:
    """Follow the dependencies of the image's project through the projects of this repository."""
    projects = _read_projects(root)
    waiting = [next(name for name, (folder, _) in projects.items() if folder == image.project)]
    seen: list[str] = []
    requirements: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.append(name)
        for requirement in projects[name][1]:
            if distribution(requirement) in projects:
                waiting.append(distribution(requirement))
            else:
                requirements.add(requirement)
    return Needs(tuple(sorted(f"{projects[name][0]}/src" for name in seen)), tuple(sorted(requirements)))


def version(root: Path) -> str:
    """The version of the product: the router's."""
    project = tomllib.loads((root / "services/router/pyproject.toml").read_text())["project"]
    return str(project["version"])


def distribution(requirement: str) -> str:
    """The normalised name in `Name[extra]>=1,<2`."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise CommandError(f"requirement {requirement!r} does not begin with a name", UNUSABLE)
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _read_projects(root: Path) -> dict[str, tuple[str, list[str]]]:
    """Every project of the repository: distribution name → folder, dependencies."""
    projects = {}
    for folder in _PROJECT_FOLDERS:
        project = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
        projects[distribution(project["name"])] = (folder, list(project.get("dependencies", ())))
    return projects
