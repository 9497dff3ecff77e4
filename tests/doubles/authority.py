"""Certificates of a temporary authority, in files as cert-manager and the kubelet write them."""

import datetime
import os
from pathlib import Path

import trustme

ROUTER, WORKER = "router.test", "workers.test"


class Authority:
    """An authority that signs certificates."""

    def __init__(self) -> None:
        self.ca = trustme.CA()

    def issue(self, *names: str, expired: bool = False, valid_days: float = 1.0) -> trustme.LeafCert:
        """A certificate for DNS names."""
        now = datetime.datetime.now(datetime.UTC)
        begin = now - datetime.timedelta(days=2)
        end = now - datetime.timedelta(minutes=1) if expired else now + datetime.timedelta(days=valid_days)
        return self.ca.issue_cert(*names, not_before=begin, not_after=end)


class Mounted:
    """A directory with tls.crt, tls.key and ca.crt, as of a mounted Secret: `write` swaps a symbolic link."""

    def __init__(self, directory: Path, authority: Authority, *names: str, **options: object) -> None:
        self.directory = directory
        self._versions = 0
        directory.mkdir(parents=True, exist_ok=True)
        self.write(authority, *names, **options)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (directory / name).symlink_to(Path("..data") / name)

    def write(self, authority: Authority, *names: str, trusted: Authority | None = None, **options: object) -> None:
        """Replace all files at once. `trusted` signs the peers, if another authority does."""
        leaf = authority.issue(*names, **options)
        self._versions += 1
        version = self.directory / f"..v{self._versions}"
        version.mkdir()
        (version / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        (version / "tls.key").write_bytes(leaf.private_key_pem.bytes())
        (version / "ca.crt").write_bytes((trusted or authority).ca.cert_pem.bytes())
        self._swap(version.name)

    def _swap(self, version: str) -> None:
        link = self.directory / "..data_tmp"
        link.symlink_to(version)
        os.replace(link, self.directory / "..data")

    @property
    def cert(self) -> str:
        return str(self.directory / "tls.crt")

    @property
    def key(self) -> str:
        return str(self.directory / "tls.key")

    @property
    def ca(self) -> str:
        return str(self.directory / "ca.crt")

    def settings(self, peer: str) -> dict[str, str]:
        """The settings of a service that shows this certificate to peers of an identity."""
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_ca": self.ca, "peer_identity": peer}
