"""A Redis in the cluster, for routers that count limits together."""

import os
import secrets

from kube import Json, apply
from lockstep_tools.chaos.kubectl import Kubectl

IMAGE = os.environ.get("LOCKSTEP_REDIS_IMAGE", "")
"""An image with `redis-server`; tests/cluster/program-image makes one of Debian's package."""

NAME, PORT = "limits", 6379
_LABELS = {"app": NAME}
_READY_S = 120


def start(kubectl: Kubectl) -> Json:
    """Run a Redis with a password, and wait until it is ready; returns the values with which a release uses it."""
    password = secrets.token_urlsafe(24)
    settings = f'port {PORT}\nbind 0.0.0.0\nsave ""\nappendonly no\ndir /tmp\nrequirepass {password}\n'
    files = {"password": password, "redis.conf": settings}
    apply(kubectl, {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "stringData": files})
    ports = [{"port": PORT}]
    spec = {"selector": _LABELS, "ports": ports}
    apply(kubectl, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": spec})
    apply(kubectl, _pod())
    kubectl.run("wait", "--for=condition=Ready", f"pod/{NAME}", f"--timeout={_READY_S}s", timeout_s=_READY_S + 10)
    peers = [{"podSelector": {"matchLabels": _LABELS}}]
    return {
        "router": {"limitsStorage": {"address": f"redis://{NAME}:{PORT}/0", "passwordSecretName": NAME}},
        "networkPolicy": {"routerEgress": [{"to": peers, "ports": ports}]},
    }


def kill(kubectl: Kubectl) -> None:
    """End it without grace; nothing starts it again."""
    kubectl.run("delete", "pod", NAME, "--force", "--grace-period=0", "--wait=true")


def _pod() -> Json:
    context = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "redis",
        "image": IMAGE,
        "command": ["redis-server", "/etc/redis/redis.conf"],
        "securityContext": context,
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": "files", "mountPath": "/etc/redis", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    spec = {
        "containers": [container],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "volumes": [{"name": "files", "secret": {"secretName": NAME}}, {"name": "tmp", "emptyDir": {}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME, "labels": _LABELS}, "spec": spec}
