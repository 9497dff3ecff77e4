"""Generate `lockstep_api` from `protos/`: run `make proto`. `--check` fails when the committed stubs differ (CI)."""

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[4]
TARGET = ROOT / "libs/api/src"
PACKAGE = Path("lockstep/v1")


def generate(out: Path) -> None:
    """Write the stubs of every proto under `out/lockstep_api/v1`."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    staged = out / "_protos"
    package = staged / "lockstep_api/v1"
    package.mkdir(parents=True)
    for proto in sorted((ROOT / "protos" / PACKAGE).glob("*.proto")):
        # The Python package is named lockstep_api; the protobuf package stays lockstep.v1, only imports change.
        (package / proto.name).write_text(proto.read_text().replace('import "lockstep/v1/', 'import "lockstep_api/v1/'))
    sources = [str(path) for path in sorted(package.glob("*.proto"))]
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{staged}", f"-I{well_known}", *flags, *sources]) != 0:
        raise SystemExit("protoc failed; its message is above")
    shutil.rmtree(staged)
    (out / "lockstep_api/__init__.py").write_text('"""Generated from protos/ by `make proto`. Do not edit."""\n')
    (out / "lockstep_api/v1/__init__.py").write_text(
        '"""Generated from protos/lockstep/v1 by `make proto`. Do not edit."""\n'
    )
    (out / "lockstep_api/py.typed").touch()


def main() -> None:
    """Write the stubs, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs, write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        names = sorted(str(path.relative_to(fresh)) for path in fresh.rglob("*") if path.is_file())
        if not check:
            shutil.rmtree(TARGET / "lockstep_api", ignore_errors=True)
            shutil.copytree(fresh / "lockstep_api", TARGET / "lockstep_api")
            print(f"{len(names)} files written under {TARGET.relative_to(ROOT)}")
            return
        _, different, missing = filecmp.cmpfiles(fresh, TARGET, names, shallow=False)
        committed = {
            str(path.relative_to(TARGET))
            for path in (TARGET / "lockstep_api").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        stale = sorted({*different, *missing, *(committed - set(names))})
        if stale:
            sys.exit(f"protos/ and libs/api differ in {', '.join(stale)}: run `make proto` and commit the result")
        print("libs/api is what protos/ gives")


if __name__ == "__main__":
    main()
