"""Objects of a cluster's API: deep, open, with long descriptions, maps of labels, extensions, and numbers or texts."""

import random
from collections.abc import Sequence

from schema_corpus.parts import Make, Schema, count, either, flag, listed, noted, one_of, record, restricted

_NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}
_QUANTITY = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|Ki|Mi|Gi)?$"}
_MANY = (
    "Standard object metadata. Servers fill in what is missing, and may change what is given.\n\nMore in the manual "
    "of conventions. Cannot be updated once it has been set; this field is alpha-level and is only honored by servers "
    "that enable it."
)


def _labels(draw: random.Random) -> Schema:
    return {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}, "description": _MANY}


def _port(draw: random.Random) -> Schema:
    number = {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535}
    return either(draw, number, _NAME) | {"x-kubernetes-int-or-string": True}


def _metadata(draw: random.Random) -> Schema:
    parts = {
        "name": _NAME,
        "namespace": _NAME,
        "labels": _labels(draw),
        "annotations": _labels(draw),
        "generation": {"type": "integer", "format": "int64"},
        "creationTimestamp": {"type": ["string", "null"], "format": "date-time"},
    }
    return noted(draw, "metadata", record(draw, parts, ["name"])) | {"description": _MANY}


def _object(draw: random.Random, version: str, kind: str, spec: Schema) -> Schema:
    parts = {
        "apiVersion": {"type": ["string", "null"], "enum": [version]},
        "kind": {"type": "string", "enum": [kind]},
        "metadata": _metadata(draw),
        "spec": spec,
    }
    made: Schema = {
        "description": _MANY,
        "type": "object",
        "properties": parts,
        "required": ["kind", "metadata", "spec"] if draw.random() < 0.7 else ["kind"],
        "x-kubernetes-group-version-kind": [{"group": "", "kind": kind, "version": version}],
    }
    if draw.random() < 0.6:
        made["additionalProperties"] = False
    return restricted(draw, made, 0.06)


def _container(draw: random.Random) -> Schema:
    probe = record(draw, {"path": {"type": "string"}, "port": _port(draw), "periodSeconds": count(draw)}, ["port"])
    variable = record(draw, {"name": {"type": "string"}, "value": {"type": "string"}}, ["name"])
    resources = {kind: {"type": "object", "additionalProperties": _QUANTITY} for kind in ("limits", "requests")}
    parts = {
        "name": _NAME,
        "image": {"type": "string"},
        "args": listed(draw, {"type": ["string", "null"]}),
        "env": listed(draw, variable) | {"x-kubernetes-patch-merge-key": "name"},
        "ports": listed(draw, record(draw, {"containerPort": count(draw), "protocol": one_of(draw, "TCP", "UDP")})),
        "resources": record(draw, resources),
        "livenessProbe": probe,
        "imagePullPolicy": one_of(draw, "Always", "Never", "IfNotPresent"),
    }
    return record(draw, parts, ["name"])


def pod(draw: random.Random) -> Schema:
    parts = {
        "containers": listed(draw, _container(draw), 2) | {"minItems": 1},
        "restartPolicy": one_of(draw, "Always", "OnFailure", "Never"),
        "nodeSelector": _labels(draw),
        "hostNetwork": flag(draw),
        "terminationGracePeriodSeconds": {"type": "integer", "format": "int64", "minimum": 0},
    }
    return _object(draw, "v1", "Pod", record(draw, parts, ["containers"]))


def deployment(draw: random.Random) -> Schema:
    template = {"metadata": _metadata(draw), "spec": record(draw, {"containers": listed(draw, _container(draw), 1)})}
    surge = either(draw, {"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]{1,3}%$"})
    rolling = record(draw, {"maxSurge": surge, "maxUnavailable": surge})
    parts = {
        "replicas": {"type": ["integer", "null"], "format": "int32"},
        "selector": record(draw, {"matchLabels": _labels(draw)}),
        "strategy": record(draw, {"type": one_of(draw, "Recreate", "RollingUpdate"), "rollingUpdate": rolling}),
        "template": record(draw, template, ["spec"]),
    }
    return _object(draw, "apps/v1", "Deployment", record(draw, parts, ["template"]))


def service(draw: random.Random) -> Schema:
    port = record(draw, {"name": _NAME, "port": count(draw), "targetPort": _port(draw)}, ["port"])
    parts = {
        "type": one_of(draw, "ClusterIP", "NodePort", "LoadBalancer"),
        "ports": listed(draw, port) | {"x-kubernetes-list-type": "map"},
        "selector": _labels(draw),
        "clusterIP": {"type": "string", "format": "ipv4"},
        "externalIPs": listed(draw, {"type": "string", "format": draw.choice(["ipv4", "ipv6"])}),
    }
    return _object(draw, "v1", "Service", record(draw, parts, ["ports"]))


def cron_job(draw: random.Random) -> Schema:
    parts = {
        "schedule": {"type": "string", "pattern": "^(@(hourly|daily|weekly)|([0-9*,/-]+ ){4}[0-9*,/-]+)$"},
        "suspend": {"type": ["boolean", "null"]},
        "concurrencyPolicy": one_of(draw, "Allow", "Forbid", "Replace"),
        "historyLimit": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 10},
        "container": _container(draw),
    }
    return _object(draw, "batch/v1", "CronJob", record(draw, parts, ["schedule"]))


def role(draw: random.Random) -> Schema:
    verb = one_of(draw, "get", "list", "watch", "create", "delete", "*")
    rule = record(draw, {"apiGroups": listed(draw, {"type": "string"}), "verbs": listed(draw, verb)}, ["verbs"])
    made = _object(draw, "rbac/v1", "Role", {"type": "object", "properties": {}})
    properties = made["properties"] | {"rules": {"type": ["array", "null"], "items": rule, "maxItems": 2}}
    return made | {"properties": properties}


CLUSTER_OBJECTS: Sequence[Make] = (pod, deployment, service, cron_job, role)
