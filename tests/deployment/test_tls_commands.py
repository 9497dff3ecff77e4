"""The commands in docs/deployment.md produce certificates that the services accept."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from lockstep_common.tls import Certificates, TlsFiles, has_identity, server_context

DOCUMENT = Path(__file__).parents[2] / "docs/deployment.md"
KUBECTL = '#!/bin/sh\n[ "$1" = apply ] && cat >/dev/null || echo secret\n'

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The directory in which the documented commands have run."""
    (block,) = re.findall(r"```bash\n(openssl req -x509.*?)```", DOCUMENT.read_text(), re.DOTALL)
    kubectl = tmp_path / "bin/kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    environment = os.environ | {"PATH": f"{kubectl.parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", block]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("service", "identity"),
    [
        ("router", "lockstep-router.serving.svc"),
        ("worker", "lockstep-workers.serving.svc"),
        ("state", "lockstep-state.serving.svc"),
    ],
)
def test_documented_commands_make_usable_certificates(made: Path, service: str, identity: str) -> None:
    files = TlsFiles(*(str(made / name) for name in (f"{service}.crt", f"{service}.key", "ca.crt")))
    certificates = Certificates(service, files, {"cert": "tls_cert", "key": "tls_key", "ca": "tls_ca"})
    server_context(certificates, verify_clients=True)
    assert has_identity(certificates.current().cert, identity)
    ca, leaf = made / "ca.crt", made / f"{service}.crt"
    for purpose in ("sslserver", "sslclient"):
        verified = ["openssl", "verify", "-purpose", purpose, "-CAfile", str(ca), str(leaf)]
        subprocess.run(verified, capture_output=True, timeout=60, check=True)
