"""What goes into the images, what they are called, and how a wrong request is answered."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from lockstep_tools.failure import CommandError
from lockstep_tools.repository.images import __main__ as command
from lockstep_tools.repository.images import builders, catalog, kernel, locks, model, provenance, wheels
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BUILDS = [
    *catalog.select([], "cpu", dev=False),
    *catalog.select(["inference-worker"], "cuda", dev=False),
]


def dockerfile(image):
    return (ROOT / image.project / "Dockerfile").read_text()


@pytest.mark.parametrize("image", catalog.IMAGES.values(), ids=lambda image: image.name)
def test_the_dockerfile_copies_the_sources_of_every_project_that_the_image_needs(image):
    copied = set(re.findall(r"(?:libs|services|tools)\S*/src", dockerfile(image)))
    assert copied | {"tools/src"} == set(catalog.needs(ROOT, image).sources) | {"tools/src"}
    assert ("tools/src" in copied) == (image.name == "tools")


@pytest.mark.parametrize("image", catalog.IMAGES.values(), ids=lambda image: image.name)
def test_every_dockerfile_has_the_same_rules(image):
    text = dockerfile(image)
    other = dockerfile(catalog.IMAGES["router"])
    rules = r"^RUN rm -rf(?:.*\\\n)*.*$|^USER .*$|^LABEL[^=]*|^ {6}org\S+?=(?!\"lockstep|\"Lockstep|\"OpenAI|\"The).*$"
    assert re.findall(rules, text, re.MULTILINE) == re.findall(rules, other, re.MULTILINE)
    assert text.rstrip().endswith("FROM runtime AS release")
    assert text.startswith("#")
    assert "\nARG BASE\n" in text.partition("FROM")[0]  # base-image.lock names it


def test_only_the_workers_image_needs_torch():
    for image in catalog.IMAGES.values():
        names = {catalog.distribution(requirement) for requirement in catalog.needs(ROOT, image).requirements}
        assert ("torch" in names) == (image.name == "inference-worker")


def test_everything_needed_is_locked():
    for build in BUILDS:
        locked = wheels.read_constraints(ROOT, build.variant)
        assert not [
            requirement
            for requirement in catalog.needs(ROOT, build.image).requirements
            if catalog.distribution(requirement) not in locked
        ]
    assert all(name in wheels.read_constraints(ROOT, None) for name in catalog.DEV_REQUIREMENTS)


def test_what_extras_need_is_locked():
    for build in BUILDS:
        locked = wheels.read_constraints(ROOT, build.variant)
        for requirement in map(Requirement, catalog.needs(ROOT, build.image).requirements):
            for extra in requirement.extras:
                needed = [Requirement(each) for each in metadata.requires(requirement.name) or ()]
                names = {each.name for each in needed if each.marker and each.marker.evaluate({"extra": extra})}
                assert names, f"{requirement} has no such extra"
                assert {catalog.distribution(name) for name in names} <= locked.keys()


def test_each_variant_asks_for_its_own_build_of_torch():
    version = wheels.read_constraints(ROOT, None)["torch"].removesuffix("+cpu")
    assert wheels.read_constraints(ROOT, "cpu")["torch"] == f"{version}+cpu"
    cuda = wheels.read_constraints(ROOT, "cuda")
    assert cuda["torch"] == f"{version},!={version.removeprefix('torch==')}+cpu"
    assert "nvidia-nccl-cu13" in cuda


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (catalog.select(["router"], "cpu", dev=False), "r/lockstep/router:0.1.0"),
        (catalog.select(["router"], "cpu", dev=True), "r/lockstep/router:0.1.0-dev"),
        (catalog.select(["inference-worker"], "cuda", dev=False), "r/lockstep/inference-worker:0.1.0-cuda"),
        (catalog.select(["inference-worker"], "cpu", dev=True), "r/lockstep/inference-worker:0.1.0-cpu-dev"),
        (catalog.select(["tools"], "cuda", dev=True), "r/lockstep/tools:0.1.0"),
    ],
)
def test_names_of_images(build, name):
    assert build[0].reference("r", "0.1.0") == name


def make_wheel(folder, name, *requires):
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-1-py3-none-any.whl", "w") as archive:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", *(f"Requires-Dist: {line}" for line in requires)]
        archive.writestr(
            f"{name.replace('-', '_')}-1.dist-info/METADATA", "\n".join([*lines, "", "Requires-Dist: text"])
        )


def test_wheels_that_only_an_unused_one_wants_are_dropped(tmp_path):
    make_wheel(tmp_path, "server", "framing>=1", "parser[fast]; python_version > '3'", "client ; extra == 'all'")
    make_wheel(
        tmp_path,
        "parser",
        "quick; extra == 'fast' or extra == 'faster'",
        'slow; extra == "slow" or extra == "slower"',
        "hub-client>=2,<3",
    )
    make_wheel(tmp_path, "hub-client", "client", "framing")
    for name in ("framing", "client", "quick", "slow"):
        make_wheel(tmp_path, name)
    wheels.drop_unused(tmp_path, ("server>=1",), ("hub-client",))
    left = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert left == {"server", "parser", "framing", "quick"}


def test_wheels_fit_the_base_images_glibc():
    platforms = wheels.platforms()
    assert platforms[0] == "manylinux_2_36_x86_64"
    assert "manylinux_2_37_x86_64" not in platforms
    assert {"manylinux2014_x86_64", "manylinux_2_28_x86_64"} <= set(platforms)


@pytest.fixture
def pip(tmp_path):
    """A pip that notes its arguments and fetches one wheel, or fails with what stands in `fails`."""
    program = tmp_path / "pip"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "with (here / 'calls').open('a') as calls: calls.write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "if (here / 'fails').exists(): sys.exit((here / 'fails').read_text())\n"
        "(pathlib.Path(sys.argv[sys.argv.index('--dest') + 1]) / 'rich-1-py3-none-any.whl').touch()\n"
    )
    program.chmod(0o755)
    return (str(program),)


def test_wheels_are_fetched_once_and_again_when_the_lock_changes(tmp_path, pip):
    for constraints in ({"rich": "rich==1"}, {"rich": "rich==1"}, {"rich": "rich==2"}):
        wheels.fetch_into(tmp_path / "tools", ("rich",), constraints, pip=pip)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) == 2
    assert "--only-binary=:all:" in calls[0]
    assert (tmp_path / "tools.constraints").read_text() == "rich==2\n"
    assert len(list((tmp_path / "tools").glob("*.whl"))) == 1


def test_a_wheel_that_cannot_be_fetched_is_reported_in_pips_words(tmp_path, pip):
    (tmp_path / "fails").write_text("WARNING: x\nERROR: No matching distribution found for rich==9\nERROR: y\n")
    with pytest.raises(
        CommandError, match=r"^wheels of tools could not be fetched, .* pip: No matching distribution .* rich==9$"
    ):
        wheels.fetch_into(tmp_path / "tools", ("rich",), {"rich": "rich==9"}, pip=pip)
    assert not (tmp_path / "tools").exists()


def test_every_pin_has_hashes_and_torch_those_of_each_build():
    pins = locks.read_pins(ROOT / locks.LOCK)
    assert len(pins) > 100
    assert len(pins["torch"].sha256) > 1
    assert {"pip", "pip-tools", "setuptools", "wheel", "cryptography"} <= set(pins)
    cuda = locks.read_pins(ROOT / locks.CUDA_LOCK)
    assert "nvidia-nccl-cu13" in cuda
    assert not set(cuda) & set(pins)


def test_a_pin_without_a_hash_is_refused(tmp_path):
    path = tmp_path / "requirements.lock"
    path.write_text(f"a==1 \\\n    --hash=sha256:{'0' * 64}\n    # via b\nb==2 ; python_version < '4'\n")
    with pytest.raises(CommandError, match=r"requirements.lock: b==2 ; python_version < '4' has no hash"):
        locks.read_pins(path)


def test_a_wheel_that_is_not_the_locked_file_is_refused(tmp_path):
    folder = tmp_path / "build/wheels/router"
    folder.mkdir(parents=True)
    make_wheel(folder, "rich")
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / locks.LOCK).write_text(f"rich==1 \\\n    --hash=sha256:{digest}\n")
    wheels.check(tmp_path, folder, None)
    assert (folder / "requirements.txt").read_text() == f"rich==1 --hash=sha256:{digest}\n"
    with wheel.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CommandError, match=r"^wheels of router were refused: rich-1-.*\.whl is not a file of the lock"):
        wheels.check(tmp_path, folder, None)
    assert not folder.exists()


def test_the_recorded_base_image_is_named_by_digest(tmp_path):
    assert re.fullmatch(r"docker\.io/library/python@sha256:[0-9a-f]{64}", locks.read_base(ROOT))
    (tmp_path / locks.BASE_LOCK).write_text("# the base\nregistry.example:5000/python:3.11\n")
    with pytest.raises(CommandError, match=r"base-image\.lock has to hold one image with its digest"):
        locks.read_base(tmp_path)


def test_glibc_of_a_library():
    assert kernel.newest_glibc(b"\0GLIBC_2.2.5\0GLIBC_2.14\0GLIBCXX_3.4\0") == (2, 14)
    assert kernel.newest_glibc(b"") == (0, 0)


def test_a_library_for_a_later_glibc_is_refused(tmp_path):
    library = tmp_path / "_cpu.so"
    library.write_bytes(b"\0GLIBC_2.38\0")
    with pytest.raises(CommandError, match=r"_cpu\.so needs glibc 2\.38, the base image has 2\.36"):
        kernel.check_glibc(library)


def test_the_kernel_is_compiled_when_its_source_changes_under_a_name_for_every_python(tmp_path):
    engine = tmp_path / "libs/engine"
    shutil.copytree(ROOT / "libs/engine", engine, ignore=shutil.ignore_patterns("*.so", "tests", "__pycache__"))
    (engine / "src/lockstep_engine/kernels/cpu.c").write_text("int lockstep_cpu_version = 4;\n")
    library = kernel.build(tmp_path)
    assert library == tmp_path / "build/kernels/lockstep_engine/kernels/_cpu.so"
    assert b"lockstep_cpu_version" in library.read_bytes()
    first = library.stat().st_mtime_ns
    assert kernel.build(tmp_path).stat().st_mtime_ns == first
    os.utime(engine / "setup.py")
    assert kernel.build(tmp_path).stat().st_mtime_ns > first


def test_the_kernel_of_an_editable_install_is_taken_while_it_is_newer_than_its_source(tmp_path, monkeypatch):
    kernels = tmp_path / "libs/engine/src/lockstep_engine/kernels"
    shutil.copytree(ROOT / "libs/engine", tmp_path / "libs/engine", ignore=shutil.ignore_patterns("*.so", "tests"))
    installed = kernels / "_cpu.cpython-311-x86_64-linux-gnu.so"
    installed.write_bytes(b"an installed library")
    monkeypatch.setenv("CC", "/no/such/compiler")
    library = kernel.build(tmp_path)
    assert library.read_bytes() == installed.read_bytes()
    os.utime(installed, (0, 0))
    library.unlink()
    with pytest.raises(CommandError, match="the engine's C kernels were not built"):
        kernel.build(tmp_path)


def test_without_a_compiler_one_sentence(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "libs/engine", tmp_path / "libs/engine", ignore=shutil.ignore_patterns("*.so", "tests"))
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(CommandError, match="the engine's C kernels were not built, a C compiler is needed: "):
        kernel.build(tmp_path)


class Programs:
    """docker and buildah as programs that note their command lines, print `container`, and can be made to fail."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, *names: str, failing: str = "none") -> None:
        """Put these on PATH, and no other; a command line with `failing` in it fails."""
        for path in self._folder.iterdir():
            path.unlink()
        for name in names:
            (self._folder / name).write_text(
                f"#!{sys.executable}\n"
                "import json, sys\n"
                f"calls = open({str(self._folder / 'calls')!r}, 'a')\n"
                "calls.write(json.dumps(sys.argv[1:]) + '\\n')\n"
                f"if {failing!r} in sys.argv: sys.exit('no such module')\n"
                "print('container')\n"
            )
            (self._folder / name).chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of every program that was run."""
        calls = self._folder / "calls"
        return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


@pytest.fixture
def programs(tmp_path, monkeypatch):
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    made = Programs(tmp_path / "programs")
    made.install("docker", "buildah")
    return made


def test_docker_is_chosen_only_when_its_daemon_answers(programs):
    assert isinstance(builders.choose(), builders.Docker)
    programs.install("docker", "buildah", failing="info")
    assert isinstance(builders.choose(), builders.Buildah)


@pytest.mark.parametrize("builder", [builders.Docker(), builders.Buildah()])
def test_a_build_names_stage_arguments_and_context_and_fetches_nothing(builder, programs):
    builder.build(builders.Recipe(Path("a/Dockerfile"), Path(".."), "dev"), "localhost/x:1", {"VERSION": "1"})
    (arguments,) = programs.calls
    assert arguments[-3:] == ["--build-arg", "VERSION=1", ".."]
    assert arguments[arguments.index("--target") + 1] == "dev"
    assert "--pull-never" in arguments or "--pull=false" in arguments


def test_plain_http_is_for_a_registry_on_this_machine_alone(programs):
    builders.Buildah().push("x", "localhost:5000/x")
    builders.Buildah().push("x", "registry.example/x")
    assert ["--tls-verify=false" in arguments for arguments in programs.calls] == [True, False]
    assert builders.is_local("127.0.0.1:5000/x")
    assert not builders.is_local("localhost.example/x")


def test_buildah_removes_the_container_of_a_command_that_fails(programs):
    programs.install("buildah", failing="run")
    with pytest.raises(CommandError, match="no such module"):
        builders.Buildah().run("x", ["true"])
    assert [arguments[0] for arguments in programs.calls] == ["from", "run", "rm"]


@pytest.mark.parametrize("builder", [builders.Docker(), builders.Buildah()])
def test_copying_a_file_out_leaves_no_container(builder, programs):
    builder.copy("x", "/usr/share/sbom/x.json", Path("/build"))
    assert any("/usr/share/sbom/x.json" in word for word in programs.calls[1])
    assert programs.calls[-1] == ["rm", "container"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["build", "--only", "redis"],
            "image 'redis': there are only router, inference-worker, kv-state-server, tools",
        ),
        (["build", "--image", "x:1"], "--image names one image, say which with --only"),
        (["push"], "push: a registry is needed"),
        (["model", "--model", "models/reference", "--name", "Llama"], "NAME 'Llama': only a-z"),
        (["model", "--model", "models/reference", "--name", "llama", "--tag", "a b"], "TAG 'a b': only letters"),
        (["model", "--model", "docs", "--name", "llama"], "MODEL: docs has no config.json, or no *.safetensors"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(arguments, sentence, programs, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_the_worker_for_the_cpu_compiles_no_gpu_kernels():
    stages = re.split(r"^FROM ", dockerfile(catalog.IMAGES["inference-worker"]), flags=re.MULTILINE)
    compiling = [stage.splitlines()[0] for stage in stages if "lockstep_engine.precompile" in stage]
    assert compiling == ["${BASE} AS gpu-kernels-cuda"]
    assert any(stage.startswith("gpu-kernels-${VARIANT} AS gpu-kernels\n") for stage in stages)
    for variant in catalog.VARIANTS:
        assert any(stage.startswith(f"${{BASE}} AS gpu-kernels-{variant}\n") for stage in stages)


def test_a_choice_of_gpu_kernels_reaches_the_build_of_the_cuda_image_alone(capsys):
    kernels = "--model llama-3.1-8b --arch 90"
    chosen = {build.name: command.build_arguments(build, "base", kernels).get("KERNELS") for build in BUILDS}
    assert chosen.pop("inference-worker-cuda") == kernels
    assert set(chosen.values()) == {None}
    assert all("KERNELS" not in command.build_arguments(build, "base") for build in BUILDS)
    assert command.main(["build", f"--kernels={kernels}"]) == 2
    assert "--kernels is for --variant cuda" in capsys.readouterr().err


def test_without_a_builder_or_a_base_image_one_sentence(programs, capsys):
    programs.install()
    assert command.main(["build"]) == 1
    assert "neither docker (with a running daemon) nor buildah" in capsys.readouterr().err
    programs.install("buildah", failing="inspect")
    assert command.main(["build", "--base", "python:none"]) == 1
    assert "base image python:none is not here" in capsys.readouterr().err
    assert command.main(["push", "--registry", "r", "--only", "tools"]) == 1
    assert "lockstep/tools:0.1.0 is not built yet" in capsys.readouterr().err


def test_builds_in_one_checkout_take_turns(tmp_path, capsys):
    path = tmp_path / "build/images.lock"
    with (
        command.turn(path, 0),
        pytest.raises(CommandError, match="another build in this checkout is not done"),
        command.turn(path, 0.5),
    ):
        pass
    assert capsys.readouterr().err == "waiting for another build in this checkout\n"
    with command.turn(path, 0):
        pass


def test_a_models_weights_have_layers_of_their_own(tmp_path):
    for name in ("config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors", ".gitattributes"):
        (tmp_path / name).touch()
    lines = model.dockerfile(tmp_path, "llama", "1").splitlines()
    assert [line for line in lines if line.startswith("COPY")] == [
        'COPY ["model-1.safetensors", "/model/"]',
        'COPY ["model-2.safetensors", "/model/"]',
        'COPY ["config.json", "tokenizer.json", "/model/"]',
    ]
    (tmp_path / "added.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CommandError, match=r"added\.json is a link"):
        model.dockerfile(tmp_path, "llama", "1")


def test_labels_hold_no_password():
    assert provenance.public("https://user:secret@git.example/lockstep.git") == "https://git.example/lockstep.git"
    assert provenance.public("git@git.example:lockstep.git") == "git@git.example:lockstep.git"


def test_an_archive_without_history_has_empty_labels(tmp_path):
    assert provenance.of(tmp_path) == {"REVISION": "", "CREATED": "", "SOURCE": ""}


def test_the_import_check_finds_what_is_missing(tmp_path):
    package = tmp_path / "shipped"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_native.py").write_text("raise RuntimeError")
    (package / "part.py").write_text("import json")

    def check(absent):
        program = [sys.executable, "-c", command.IMPORT_ALL, absent, "shipped"]
        return subprocess.run(program, cwd=tmp_path, check=False, capture_output=True, text=True)

    assert check("").returncode == 0
    (package / "part.py").write_text("import not_in_the_image.part")
    assert "No module named 'not_in_the_image'" in check("").stderr
    assert "No module named 'not_in_the_image'" in check("another").stderr
    assert check("another,not_in_the_image").returncode == 0


def test_only_the_cuda_build_has_the_libraries_of_gpus():
    absent = {
        variant: catalog.select(["inference-worker"], variant, dev=False)[0].absent for variant in catalog.VARIANTS
    }
    assert absent == {"cpu": ("triton", "nvidia-ml-py"), "cuda": ()}
