"""`lockstep keys`: makes an API key, and the entry of the router's file of keys that accepts it."""

import argparse
import hashlib
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta

from lockstep_tools.arguments import integer

DESCRIPTION = """\
Make an API key for a tenant. The key goes to stderr, once: it is stored nowhere. The file of keys that
accepts it goes to stdout, with the key's hash; lines under `keys:` can be moved to an existing file."""

EXAMPLES = """\
  lockstep keys search > keys.yaml
  lockstep keys search --days 90"""

_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("tenant", metavar="TENANT", type=_tenant, help="name of the tenant")
    parser.add_argument("--days", type=integer(1, 36_500), metavar="N", help="the key expires after so many days")


def run(arguments: argparse.Namespace) -> int:
    """Print the key and its file."""
    key = f"lsk-{secrets.token_urlsafe(_KEY_BYTES)}"
    print(f"tenants:\n- name: '{arguments.tenant}'\n  keys:")
    print(f"  - sha256: '{hashlib.sha256(key.encode()).hexdigest()}'")
    if arguments.days is not None:
        end = datetime.now(UTC) + timedelta(days=arguments.days)
        print(f"    not_after: {end:%Y-%m-%dT%H:%M:%SZ}")
    print(f"the key, which is shown once: {key}", file=sys.stderr)
    return 0


def _tenant(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first (given: {text!r})")
    return text
