"""Typed settings: one class a service, read from flags, then environment (`LOCKSTEP_…`), then a YAML file, then
defaults.

Unknown keys are errors wherever they come from. `--help` is the reference.
"""

import os
import sys
from typing import Any, NoReturn, Self

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

CONFIG_VARIABLE = "LOCKSTEP_CONFIG"
"""Names the YAML file."""

USAGE_EXIT_CODE = 2
"""The exit code for settings, models and ports that cannot be used: trying again cannot help."""


def fail(message: str) -> NoReturn:
    """End the process with one sentence on stderr and exit code 2."""
    print(message, file=sys.stderr)
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
        """Flags before environment before file."""
        path = os.environ.get(CONFIG_VARIABLE)
        file = (YamlConfigSettingsSource(settings_cls, yaml_file=path),) if path else ()
        return (init_settings, env_settings, *file)

    @classmethod
    def load(cls, program: str, arguments: list[str] | None = None) -> Self:
        """Read the settings of the process, or end it with exit code 2 and a sentence for each wrong one.

        Args:
            program: the name shown by `--help`.
            arguments: flags; the process's own when None.
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
            fail("\n".join(_sentence(dict(entry)) for entry in error.errors()))
        except Exception as error:  # a file that is no YAML mapping, a variable that is no JSON
            fail(f"settings: {error}")


def _sentence(entry: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in entry["loc"]) or "settings"
    given = "" if entry["type"] in ("missing", "extra_forbidden") else f" (given: {entry['input']!r})"
    return f"setting {name}: {entry['msg']}{given}"
