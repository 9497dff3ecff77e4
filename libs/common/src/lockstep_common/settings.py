"""Typed settings: one class for each service, read from flags, environment (`LOCKSTEP_…`), a YAML file and defaults, in
this order of priority.

Unknown keys are errors in every source. `--help` is the reference.
"""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, Self

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from lockstep_common.termination import leave_message

CONFIG_VARIABLE = "LOCKSTEP_CONFIG"
"""Environment variable with the path of the YAML file."""

USAGE_EXIT_CODE = 2
"""The exit code for settings, models and ports that cannot be used: another start cannot help."""


def fail(message: str, termination_log: str | None = None) -> NoReturn:
    """End the process with exit code 2 and one sentence, on stderr and as the container's termination message."""
    print(message, file=sys.stderr)
    leave_message(message, termination_log)
    raise SystemExit(USAGE_EXIT_CODE)


class ServiceSettings(BaseSettings):
    """Base of every service's settings."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_", extra="forbid", frozen=True, env_nested_delimiter="__")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Set the order: flags, then environment, then file."""
        path = os.environ.get(CONFIG_VARIABLE)
        file = (YamlConfigSettingsSource(settings_cls, yaml_file=path),) if path else ()
        return (init_settings, env_settings, *file)

    @classmethod
    def load(cls, program: str, arguments: list[str] | None = None) -> Self:
        """Read the settings of the process, or end it with exit code 2 and a sentence for each invalid one.

        Args:
            program: the name shown by `--help`.
            arguments: flags; None: those of the process.
        """
        path = os.environ.get(CONFIG_VARIABLE)
        if path and not os.path.isfile(path):
            fail(f"{CONFIG_VARIABLE}={path}: no such file")
        flags: CliSettingsSource[BaseSettings] = CliSettingsSource(
            cls,
            cli_prog_name=program,
            cli_parse_args=sys.argv[1:] if arguments is None else arguments,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            cli_avoid_json=True,
        )
        try:
            return cls(_cli_settings_source=flags)  # type: ignore[call-arg]
        except ValidationError as error:
            # A default that depends on an invalid setting is not an error by itself.
            wrong = [dict(entry) for entry in error.errors() if entry["type"] != "default_factory_not_called"]
            fail("\n".join(map(_sentence, wrong)))
        except Exception as error:  # e.g. a file without a YAML mapping, or a variable that is not JSON
            fail(f"settings: {error}")


_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.IGNORECASE)
_URI = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]{1,2000}")


def check_identity(value: str, *, may_be_uri: bool = True) -> str:
    """Return the identity of a peer's certificate; raise ValueError unless it is a DNS name or a URI."""
    if may_be_uri and _URI.fullmatch(value):
        return value
    labels = value.split(".")
    if len(value) > 253 or labels[-1].isdigit() or not all(map(_DNS_LABEL.fullmatch, labels)):
        raise ValueError("must be a DNS name or a URI" if may_be_uri else "must be a DNS name: gRPC checks no URI")
    return value


def check_together(files: Mapping[str, str | None], identity: str | None) -> None:
    """Raise ValueError unless all files of mutual TLS and the peer's identity are given, or none."""
    given = [*files.values(), identity]
    if any(given) and not all(given):
        raise ValueError(f"{', '.join(files)} and peer_identity go together")


def _sentence(entry: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in entry["loc"]) or "settings"
    nothing_given = entry["type"] in ("missing", "extra_forbidden") or entry["input"] in (None, "", ())
    given = "" if nothing_given else f" (given: {entry['input']!r})"
    return f"setting {name}: {entry['msg'].removeprefix('Value error, ')}{given}"
