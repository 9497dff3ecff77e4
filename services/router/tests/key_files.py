"""Files of API keys, as tests write them."""

import hashlib
import json
import os

KEY = "lsk-the-first-key-of-search"
SECOND_KEY = "lsk-the-second-key-of-search"
OTHER_KEY = "lsk-the-key-of-chat"


def digest(key):
    return hashlib.sha256(key.encode()).hexdigest()


def tenant(name, *keys, not_after=None, **limits):
    """An entry of the file. JSON is YAML, too."""
    entries = [{"sha256": digest(key)} | ({"not_after": not_after} if not_after else {}) for key in keys]
    return {"name": name, "keys": entries} | limits


def write(path, *tenants):
    """Replace the file at once, as the kubelet does."""
    return write_text(path, json.dumps({"tenants": tenants}))


def write_text(path, text):
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)
    return str(path)


def bearer(key):
    return {"authorization": f"Bearer {key}"}
