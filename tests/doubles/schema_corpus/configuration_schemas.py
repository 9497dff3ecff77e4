"""Files that people write for their tools: nested, with many optional parts, short forms beside long ones, and maps."""

import random
from collections.abc import Sequence

from schema_corpus.parts import (
    Make,
    Schema,
    address,
    any_of,
    count,
    either,
    flag,
    headed,
    label,
    listed,
    mapping,
    noted,
    nullable,
    one_of,
    record,
    restricted,
)

_LEVELS = ("off", "info", "warn", "error")


def linter(draw: random.Random) -> Schema:
    level = one_of(draw, *_LEVELS)
    options = record(draw, {"max": count(draw), "ignore": listed(draw, label(draw)), "strict": flag(draw)})
    rule = either(draw, level, {"type": "array", "items": [level, options], "minItems": 1, "maxItems": 2})
    if draw.random() < 0.6:
        rule = either(draw, one_of(draw, *_LEVELS), record(draw, {"level": level, "options": options}, ["level"]))
        rule = {"anyOf": next(iter(rule.values()))}
    parts = {
        "extends": any_of(draw, {"type": "string"}, listed(draw, {"type": "string", "maxLength": 40})),
        "root": flag(draw),
        "rules": mapping(draw, rule),
        "ignorePatterns": listed(draw, {"type": "string", "minLength": 1}),
    }
    draft = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Linter"}
    return draft | restricted(draw, record(draw, parts, ["rules"]))


def build_pipeline(draw: random.Random) -> Schema:
    step = record(
        draw,
        {
            "name": label(draw),
            "run": {"type": "string", "minLength": 1},
            "env": mapping(draw, any_of(draw, {"type": "string"}, {"type": "number"}, {"type": "boolean"})),
            "timeout": nullable(draw, count(draw)),
            "when": one_of(draw, "always", "on success", "on failure"),
        },
        ["run"],
    )
    job = record(
        draw,
        {
            "image": label(draw),
            "needs": either(draw, {"type": "string"}, listed(draw, {"type": "string"})),
            "steps": listed(draw, step) | {"minItems": 1},
            "matrix": mapping(draw, listed(draw, any_of(draw, {"type": "string"}, {"type": "integer"}))),
        },
        ["steps"],
    )
    parts = {
        "version": one_of(draw, 1, 2, "2.1"),
        "on": any_of(draw, one_of(draw, "push", "tag", "manual"), listed(draw, one_of(draw, "push", "tag"))),
        "jobs": {
            "type": "object",
            "patternProperties": {"^[A-Za-z_][A-Za-z0-9_-]*$": job},
            "additionalProperties": False,
        },
    }
    return headed(draw, restricted(draw, record(draw, parts, ["jobs"])), "Build pipeline")


def package_manifest(draw: random.Random) -> Schema:
    version = {"type": "string", "pattern": "^(0|[1-9][0-9]*)\\.(0|[1-9][0-9]*)\\.(0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?$"}
    person = either(
        draw,
        {"type": "string"},
        record(
            draw, {"name": label(draw), "email": {"type": "string", "format": "email"}, "url": address(draw)}, ["name"]
        ),
    )
    range_ = {"type": "string", "pattern": "^[\\^~]?[0-9]+(\\.[0-9]+){0,2}$"}
    parts = {
        "name": {"type": "string", "pattern": "^(@[a-z0-9-]+/)?[a-z0-9-]+$", "maxLength": 214},
        "version": version,
        "private": flag(draw),
        "keywords": listed(draw, {"type": "string"}),
        "author": person,
        "contributors": listed(draw, person, 2),
        "dependencies": mapping(draw, range_),
        "scripts": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "properties": {"test": {"type": "string"}},
        },
        "license": any_of(draw, one_of(draw, "MIT", "Apache-2.0", "BSD-3-Clause"), {"type": "string"}),
    }
    return headed(draw, restricted(draw, record(draw, parts, ["name", "version"])), "Package manifest")


def server_settings(draw: random.Random) -> Schema:
    tls = record(
        draw,
        {"cert": label(draw), "key": label(draw), "min_version": one_of(draw, "1.2", "1.3"), "verify": flag(draw)},
        ["cert", "key"],
    )
    limits = record(draw, {"requests_per_second": count(draw), "burst": count(draw), "body_bytes": count(draw)})
    parts = {
        "listen": any_of(
            draw, {"type": "integer", "minimum": 1, "maximum": 65535}, {"type": "string", "format": "hostname"}
        ),
        "tls": nullable(draw, tls),
        "limits": limits,
        "upstreams": listed(draw, record(draw, {"url": address(draw), "weight": count(draw)}, ["url"])),
        "log": record(
            draw, {"level": one_of(draw, *_LEVELS), "format": one_of(draw, "json", "text"), "file": label(draw)}
        ),
        "headers": mapping(draw, {"type": "string", "maxLength": 30}),
    }
    return headed(draw, restricted(draw, record(draw, parts, ["listen"])), "Server settings")


def editor_theme(draw: random.Random) -> Schema:
    colour = {"type": "string", "pattern": "^#([0-9a-fA-F]{3}|[0-9a-fA-F]{6})$"}
    style = one_of(draw, "bold", "italic", "underline", "none")
    token = record(
        draw, {"scope": any_of(draw, label(draw), listed(draw, label(draw))), "color": colour, "style": style}
    )
    parts = {
        "name": label(draw),
        "type": one_of(draw, "dark", "light"),
        "colors": {
            "type": "object",
            "properties": {"background": colour, "foreground": colour},
            "additionalProperties": colour,
        },
        "tokens": listed(draw, token),
        "font_size": {"type": "number", "minimum": 6, "maximum": 96},
    }
    return headed(draw, record(draw, parts, ["name", "colors"]), "Theme")


def dependency_updates(draw: random.Random) -> Schema:
    schedule = record(
        draw,
        {
            "interval": one_of(draw, "daily", "weekly", "monthly"),
            "day": one_of(draw, "monday", "friday"),
            "cron": {"type": "string", "pattern": "^([0-9*/,-]+ ){4}[0-9*/,-]+$"},
        },
        ["interval"],
    )
    update = record(
        draw,
        {
            "ecosystem": one_of(draw, "pip", "npm", "cargo", "docker"),
            "directory": {"type": "string", "pattern": "^/"},
            "schedule": {"$ref": "#/definitions/schedule"},
            "ignore": listed(draw, {"$ref": "#/definitions/rule"}),
            "limit": count(draw),
        },
        ["ecosystem", "schedule"],
    )
    rule = record(draw, {"name": label(draw), "versions": listed(draw, {"type": "string"})}, ["name"])
    parts = {"version": {"const": 2}, "updates": listed(draw, update) | {"minItems": 1}}
    definitions = {"schedule": noted(draw, "schedule", schedule), "rule": rule, "unused": {"not": {}}}
    made = record(draw, parts, ["version", "updates"]) | {"definitions": definitions}
    return {"$schema": "http://json-schema.org/draft-07/schema#"} | made


def feature_flags(draw: random.Random) -> Schema:
    value = any_of(draw, {"type": "boolean"}, {"type": "string"}, {"type": "number"}, {"type": "object"})
    segment = record(
        draw,
        {
            "attribute": label(draw),
            "operator": one_of(draw, "in", "not in", ">=", "<", "matches"),
            "values": listed(draw, {"type": ["string", "number", "boolean"]}),
        },
        ["attribute", "operator"],
    )
    definition = record(
        draw,
        {
            "enabled": flag(draw),
            "rollout": {"type": "integer", "minimum": 0, "maximum": 100},
            "variants": mapping(draw, value),
            "segments": listed(draw, segment),
        },
        ["enabled"],
    )
    return headed(draw, {"type": "object", "additionalProperties": definition}, "Feature flags")


def container_stack(draw: random.Random) -> Schema:
    port = either(draw, {"type": "integer"}, {"type": "string", "pattern": "^[0-9]{1,5}(:[0-9]{1,5})?(/(tcp|udp))?$"})
    service = record(
        draw,
        {
            "image": {"type": "string", "pattern": "^[a-z0-9./-]+(:[A-Za-z0-9._-]+)?$"},
            "command": nullable(draw, any_of(draw, {"type": "string"}, listed(draw, {"type": "string"}))),
            "ports": listed(draw, port),
            "environment": either(
                draw,
                mapping(draw, {"type": ["string", "number", "boolean", "null"]}),
                listed(draw, {"type": "string", "pattern": "^[A-Z_]+=.*$"}),
            ),
            "restart": one_of(draw, "no", "always", "on-failure"),
            "depends_on": listed(draw, {"type": "string"}),
            "healthcheck": record(draw, {"test": {"type": "string"}, "retries": count(draw), "disable": flag(draw)}),
        },
        ["image"],
    )
    parts = {
        "services": {
            "type": "object",
            "patternProperties": {"^[a-zA-Z0-9._-]+$": service},
            "additionalProperties": False,
        },
        "volumes": mapping(draw, nullable(draw, record(draw, {"driver": label(draw), "external": flag(draw)}))),
        "name": label(draw),
    }
    return headed(draw, restricted(draw, record(draw, parts, ["services"])), "Container stack")


CONFIGURATIONS: Sequence[Make] = (
    linter,
    build_pipeline,
    package_manifest,
    server_settings,
    editor_theme,
    dependency_updates,
    feature_flags,
    container_stack,
)
