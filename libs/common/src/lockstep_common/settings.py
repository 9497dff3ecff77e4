"""Typed settings: bases for each service's class, read from flags, environment (`LOCKSTEP_…`), a YAML file and
defaults, in this order of priority.

Unknown flags and unknown keys of the file are errors. So is a variable that is one slip away from a setting; other
unknown variables are warned of, because services may share an environment. `--help` is the reference.
"""

import logging
import os
import re
import sys
from collections.abc import Collection
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from lockstep_common.early_lines import keep_lines
from lockstep_common.lifecycle import DIE_WITH_PARENT_VARIABLE
from lockstep_common.strict_yaml import load_yaml
from lockstep_common.termination import PATH_VARIABLE, leave_message

logger = logging.getLogger("lockstep.settings")

CONFIG_VARIABLE = "LOCKSTEP_CONFIG"
"""Environment variable with the path of the YAML file."""

_PREFIX = "LOCKSTEP_"
_OTHER_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        DIE_WITH_PARENT_VARIABLE,
        PATH_VARIABLE,
        # Of the engine, the client and the tools.
        "LOCKSTEP_API_KEY",
        "LOCKSTEP_CPU_KERNELS",
        "LOCKSTEP_PREBUILT_KERNELS",
        # Pods of all services have them, whichever of them use them.
        "LOCKSTEP_NODE_NAME",
        "LOCKSTEP_POD_UID",
    }
)
"""Variables that are no settings of a service."""
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
"""Variables that Kubernetes sets in pods for each Service of the namespace; some names begin with `lockstep`."""
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
"""What the value of another such variable begins with, whose name is like that of a setting for a port."""

USAGE_EXIT_CODE = 2
"""The exit code for settings, models and ports that cannot be used: another start cannot help."""


def fail(message: str, termination_log: str | None = None) -> NoReturn:
    """End the process with exit code 2 and one sentence, on stderr and as the container's termination message."""
    for handler in logging.root.handlers:
        handler.flush()  # lines that wait would follow the sentence
    print(message, file=sys.stderr)
    leave_message(message, termination_log)
    raise SystemExit(USAGE_EXIT_CODE)


class _FileSource(YamlConfigSettingsSource):
    """The YAML file. A setting that is there twice is an error; the library takes the last one."""

    def _read_file(self, file_path: Path | Traversable) -> dict[str, Any]:
        return load_yaml(file_path.read_bytes()) or {}


class ServiceSettings(BaseSettings):
    """Base of every service's settings."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True, env_nested_delimiter="__")

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
        file = (_FileSource(settings_cls, yaml_file=path),) if path else ()
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
        cls._check_variables()
        try:
            return cls(_cli_settings_source=flags)  # type: ignore[call-arg]
        except ValidationError as error:
            # A default that depends on an invalid setting is not an error by itself.
            wrong = [dict(entry) for entry in error.errors() if entry["type"] != "default_factory_not_called"]
            fail("\n".join(map(_sentence, wrong)))
        except Exception as error:  # e.g. a file without a YAML mapping, or a variable that is not JSON
            fail(f"settings: {error}")

    @classmethod
    def _check_variables(cls) -> None:
        """End the process for a variable whose name is a slip, and warn of others that are not known."""
        known = [f"{_PREFIX}{name.upper()}" for name in cls.model_fields]
        unknown = unknown_variables(known)
        slips = [(name, _meant(name, known)) for name in unknown]
        wrong = [f"{name}: there is no such setting; is {meant} meant?" for name, meant in slips if meant]
        if wrong:
            fail("\n".join(wrong))
        if unknown:
            keep_lines()
            logger.warning("variables that are no settings of this service: %s", ", ".join(unknown))

    def shown(self) -> dict[str, Any]:
        """The settings as JSON types, without secrets."""
        shown: dict[str, Any] = without_secrets(self.model_dump(mode="json"))
        return shown


def unknown_variables(known: Collection[str]) -> list[str]:
    """Variables of the environment with the project's prefix that nothing is known to read.

    Args:
        known: the variables for the settings of this service.
    """
    unknown = []
    for variable, value in os.environ.items():
        name = variable.upper()  # the case of names does not matter
        if not name.startswith(_PREFIX) or name.partition("__")[0] in known or name in _OTHER_VARIABLES:
            continue
        if _SERVICE_LINK.search(name) or (name.endswith("_PORT") and _SERVICE_ADDRESS.match(value)):
            continue
        unknown.append(variable)
    return sorted(unknown)


def _meant(name: str, known: Collection[str]) -> str | None:
    """The variable that a name is one slip away from, if there is one. A name that differs more may be another
    service's.
    """
    return next((each for each in known if _is_slip(name.upper(), each)), None)


def _is_slip(given: str, meant: str) -> bool:
    """Whether one letter is missing, superfluous or wrong, or two neighbours are swapped."""
    while given and meant and given[0] == meant[0]:
        given, meant = given[1:], meant[1:]
    while given and meant and given[-1] == meant[-1]:
        given, meant = given[:-1], meant[:-1]
    return max(len(given), len(meant)) <= 1 or (len(given) == 2 and given == meant[::-1])


_SECRET_NAME = re.compile(r"(^|_)(password|secret|token|api_key)$")
_USER_INFO = re.compile(r"(?<=://)[^/@\s]*@")


def without_secrets(value: Any, name: str = "") -> Any:
    """JSON types without what may be secret: values whose name says so, and user and password in addresses."""
    if isinstance(value, dict):
        return {key: without_secrets(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [without_secrets(each, name) for each in value]
    if value is not None and _SECRET_NAME.search(name):
        return "(not shown)"
    return _USER_INFO.sub("(not shown)@", value) if isinstance(value, str) else value


UNQUOTED = "unquoted"
"""Type of a `PydanticCustomError` for a value that may be a secret: the error that ends the process omits it."""

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.IGNORECASE)
_ENDPOINT = re.compile(
    r"(https?://)?(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]{0,255})?"
)
_URI = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]{1,2000}")


def check_identity(value: str, *, may_be_uri: bool = True) -> str:
    """Return the identity of a peer's certificate; raise ValueError unless it is a DNS name or a URI."""
    if may_be_uri and _URI.fullmatch(value):
        return value
    labels = value.split(".")
    if len(value) > 253 or labels[-1].isdigit() or not all(map(_DNS_LABEL.fullmatch, labels)):
        raise ValueError("must be a DNS name or a URI" if may_be_uri else "must be a DNS name: gRPC checks no URI")
    return value


class PodSettings(ServiceSettings):
    """Settings of every service that runs in pods: its name there, the management port, TLS between services."""

    peer_identity_may_be_uri: ClassVar[bool] = True
    """Whether certificates of peers can be checked for a URI, or for DNS names only."""

    pod_name: str | None = Field(None, description="Name of the pod that this process runs in.")
    pod_namespace: str | None = Field(None, description="The pod's namespace.")
    management_host: str = Field("127.0.0.1", description="Address of the management port.")
    liveness_timeout_s: float = Field(
        20.0, gt=0, description="The management port's /healthz is 503 when the event loop has not run for this long."
    )
    tls_cert: str | None = Field(
        None, description="PEM file of the certificate and chain shown to other services; plain text if not set."
    )
    tls_key: str | None = Field(None, description="PEM file of its key.")
    tls_ca: str | None = Field(
        None, description="PEM file of the authorities that other services' certificates come from."
    )
    peer_identity: str | None = Field(
        None,
        validate_default=True,
        description="Name that the other services' certificates have to be for, all others are refused: a DNS name or, "
        "for routers that connect to a worker, a URI (spiffe://…).",
    )
    management_tls: bool = Field(False, description="HTTPS on the management port, with `tls_cert`.")
    native_histograms: bool = Field(
        True,
        description="Native histograms on /metrics for a scraper that asks for Prometheus' protobuf format; without, "
        "it gets text.",
    )
    termination_log: str | None = Field(
        None, description="File for the sentence with which the process ends; /dev/termination-log if that is there."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")
    otlp_endpoint: str | None = Field(
        None,
        description="URL of the OpenTelemetry collector that gets traces, host:port for gRPC in plain text; `memory`: "
        "none does, and the service keeps the newest ones for `lockstep trace`. OTEL_EXPORTER_OTLP_ENDPOINT if not "
        "set, and no traces without both.",
    )
    otlp_protocol: Literal["grpc", "http"] | None = Field(
        None, description="Of OTLP to the collector; OTEL_EXPORTER_OTLP_PROTOCOL or grpc if not set."
    )
    trace_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Part of the traces that is kept if the caller has not decided; OTEL_TRACES_SAMPLER_ARG or 0.1 if "
        "not set, 1 in `memory`. Requests that fail, are slow or move to another worker are "
        "kept besides.",
    )
    trace_slow_s: float = Field(
        10.0, gt=0, description="A request that takes longer, to its first token or to its end, has its trace kept."
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not _ENDPOINT.fullmatch(value):
            raise ValueError("must be http://host:port, https://host:port or host:port, without a password")
        return value

    @field_validator("peer_identity")
    @classmethod
    def _check_tls(cls, value: str | None, info: ValidationInfo) -> str | None:
        files = {name: info.data.get(name) for name in ("tls_cert", "tls_key", "tls_ca")}
        given = [*files.values(), value]
        if any(given) and not all(given):
            raise ValueError(f"{', '.join(files)} and peer_identity go together")
        return None if value is None else check_identity(value, may_be_uri=cls.peer_identity_may_be_uri)

    @field_validator("management_tls")
    @classmethod
    def _check_management_tls(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not info.data.get("tls_cert"):
            raise ValueError("needs tls_cert")
        return value


_SCHEME = r"((?:[a-z][a-z0-9+.-]*://)?)"
_USER_IN_TEXT = re.compile(rf"{_SCHEME}\S*@", re.IGNORECASE)
_USER_IN_VALUE = re.compile(rf"\A{_SCHEME}.*@", re.IGNORECASE | re.DOTALL)


def _without_users(value: Any) -> Any:
    """Without what may be a user and a password in a wrong address, which is not in the form of one."""
    if isinstance(value, dict):
        return {key: _without_users(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_users(each) for each in value]
    return _without_user(_USER_IN_VALUE, value) if isinstance(value, str) else value


def _without_user(form: re.Pattern[str], text: str) -> str:
    return form.sub(r"\1(not shown)@", text)


def _sentence(entry: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in entry["loc"]) or "settings"
    nothing_given = entry["type"] in ("missing", "extra_forbidden", UNQUOTED) or entry["input"] in (None, "", ())
    given = "" if nothing_given else f" (given: {without_secrets(_without_users(entry['input']), name)!r})"
    message = _without_user(_USER_IN_TEXT, entry["msg"].removeprefix("Value error, "))
    return f"setting {name}: {message}{given}"
