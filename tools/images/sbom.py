"""The software bill of materials of an image (CycloneDX): its Python packages, its Debian packages and its Python."""

import json
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

DPKG_STATUS = Path("/var/lib/dpkg/status")


def write(tool: Path, venv: Path, name: str, version: str, path: Path, status: Path = DPKG_STATUS) -> None:
    """Describe the environment `venv` and the system below it; the same input gives the same file.

    Args:
        tool: the environment that has cyclonedx-py.
        venv: the environment to describe.
        name: the image's name.
        version: the image's version.
        path: the file to write; its folder is made.
        status: dpkg's file with the status of the system's packages.
    """
    command = [str(tool / "bin/cyclonedx-py"), "environment", "--output-reproducible", "--of", "JSON", str(venv)]
    document = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    document["metadata"]["component"] = {
        "type": "container",
        "bom-ref": f"lockstep-{name}",
        "name": f"lockstep/{name}",
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    document["components"] += [interpreter(), *debian_packages(status.read_text())]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def interpreter() -> dict[str, Any]:
    """The Python that runs this, which is the image's."""
    purl = f"pkg:generic/python@{platform.python_version()}"
    return {
        "type": "application",
        "bom-ref": purl,
        "name": "python",
        "version": platform.python_version(),
        "purl": purl,
    }


def debian_packages(status: str) -> list[dict[str, Any]]:
    """The installed packages of a dpkg status file."""
    packages = []
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status") != "install ok installed":
            continue
        name, version = fields["Package"], fields["Version"]
        purl = f"pkg:deb/debian/{name}@{version}?arch={fields['Architecture']}"
        packages.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    return packages
