"""With TLS on and policies off the release serves, a stranger's pod gets nothing, and new certificates are used."""

import json
from collections.abc import Iterator

import pytest
from authority import Authority
from helm import NAME, Installation, helm, install
from kube import Json, Namespaces, Report, Visitor, apply
from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import ROUTER, WORKER, of
from machine import wait_for

GRPC, HTTP = 9000, 8000
MANAGEMENT = {ROUTER: 8001, WORKER: 9001}
VALUES = {
    "tls": {"enabled": True},
    "networkPolicy": {"enabled": False},
    "router": {"replicas": 1},
    "modelDefaults": {"replicas": 1, "tp": 1},
}
_SYNC_S = 180.0
"""The kubelet puts a changed Secret into pods within a minute or so."""

# Runs in the visitor's pod, with the router's image: asks a worker for its health in several ways.
ASK = """
import json, ssl, socket, sys
import grpc

given = json.loads(sys.argv[1])
target = f"{given['address']}:{given['port']}"
authority = given["ca"].encode()

def health(channel):
    call = channel.unary_unary("/grpc.health.v1.Health/Check")
    try:
        return call(b"", timeout=10).hex() or "answered"
    except grpc.RpcError as error:
        return error.code().name

def secure(key=None, chain=None):
    credentials = grpc.ssl_channel_credentials(authority, key, chain)
    return grpc.secure_channel(target, credentials, (("grpc.ssl_target_name_override", given["identity"]),))

def serial():
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((given["address"], given["port"]), 10) as plain:
            with context.wrap_socket(plain) as connection:
                return connection.getpeercert(binary_form=True).hex()
    except OSError as error:
        return type(error).__name__

said = {"plain text": health(grpc.insecure_channel(target)), "no certificate": health(secure()), "shown": serial()}
for name in ("stranger", "router"):
    if name in given:
        said[name] = health(secure(given[name]["key"].encode(), given[name]["chain"].encode()))
print(json.dumps(said))
"""


# The same for a management port: the status of each path.
ASK_MANAGEMENT = """
import http.client, json, ssl, sys, tempfile

given = json.loads(sys.argv[1])
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
if given["pair"]:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(given["pair"]["chain"] + given["pair"]["key"])
        file.flush()
        context.load_cert_chain(file.name)

def status(connection, path):
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return "refused"

said = {}
for path in ("/healthz", "/readyz", "/metrics", "/status"):
    secure = http.client.HTTPSConnection(given["address"], given["port"], timeout=10, context=context)
    said[path] = status(secure, path)
said["plain text"] = status(http.client.HTTPConnection(given["address"], given["port"], timeout=10), "/healthz")
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def secured(namespaces: Namespaces, registry: str, authority: Authority, report: Report) -> Iterator[Installation]:
    """A small release with TLS and without policies."""
    kubectl = namespaces.new("secured")
    for component in ("router", "worker"):
        write_secret(kubectl, authority, component)
    with install(kubectl, registry, VALUES) as installation:
        report["tls_install_to_ready_s"] = installation.ready_s
        yield installation


@pytest.fixture(scope="module")
def stranger(namespaces: Namespaces, secured: Installation) -> Visitor:
    """A pod in another namespace, with gRPC and Python."""
    router = of(secured.release.pods(), ROUTER)[0]
    image = secured.kubectl.json("get", "pod", router.name)["spec"]["containers"][0]["image"]
    return Visitor(namespaces.new("stranger"), str(image))


def write_secret(kubectl: Kubectl, authority: Authority, component: str) -> None:
    """The Secret of a service, as the chart wants it."""
    service = {"router": f"{NAME}-router", "worker": f"{NAME}-workers"}[component]
    pair = shown(authority, f"{service}.{kubectl.namespace}.svc")
    data = {"tls.crt": pair["chain"], "tls.key": pair["key"], "ca.crt": authority.ca.cert_pem.bytes().decode()}
    metadata = {"name": f"{NAME}-{component}-tls"}
    apply(kubectl, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data})


def shown(authority: Authority, name: str) -> Json:
    """A certificate of the authority, as PEM."""
    leaf = authority.issue(name)
    chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
    return {"key": leaf.private_key_pem.bytes().decode(), "chain": chain.decode()}


def ask(visitor: Visitor, installation: Installation, component: str, port: int, ca: Authority, **pairs: Json) -> Json:
    """What the visitor's pod gets from a pod of the release."""
    pod = of(installation.release.pods(), component)[0]
    address = installation.kubectl.json("get", "pod", pod.name)["status"]["podIP"]
    identity = f"{NAME}-workers.{installation.namespace}.svc"
    ca_pem = ca.ca.cert_pem.bytes().decode()
    given = json.dumps({"address": address, "port": port, "identity": identity, "ca": ca_pem, **pairs})
    answer: Json = json.loads(visitor.kubectl.run("exec", *visitor.where, "--", "python", "-c", ASK, given))
    return answer


def test_release_with_tls_serves(secured: Installation) -> None:
    output = helm("test", NAME, "-n", secured.namespace, "--logs")
    for check in ("ok   chat", "ok   stream", "ok   workers: 1 behind"):
        assert check in output, output


def test_strangers_pod_gets_nothing(secured: Installation, stranger: Visitor, authority: Authority) -> None:
    pods = of(secured.release.pods(), WORKER)
    address = secured.kubectl.json("get", "pod", pods[0].name)["status"]["podIP"]
    assert stranger.reaches((address, GRPC)) == {(address, GRPC): True}, "no policy is in the way"
    of_the_router = shown(authority, f"{NAME}-router.{secured.namespace}.svc")
    of_another = shown(authority, "stranger.test")
    said = ask(stranger, secured, WORKER, GRPC, authority, stranger=of_another, router=of_the_router)
    assert said["plain text"] == "UNAVAILABLE"
    assert said["no certificate"] == "UNAVAILABLE"
    assert said["stranger"] == "PERMISSION_DENIED"
    assert said["router"] == "0801"  # SERVING: the same connection works with the right certificate
    foreign = shown(Authority(), f"{NAME}-router.{secured.namespace}.svc")
    assert ask(stranger, secured, WORKER, GRPC, authority, stranger=foreign)["stranger"] == "UNAVAILABLE"


def statuses(visitor: Visitor, installation: Installation, component: str, *pair: Json) -> Json:
    """The HTTP status of each path of a pod's management port, with a certificate or without."""
    pod = of(installation.release.pods(), component)[0]
    address = installation.kubectl.json("get", "pod", pod.name)["status"]["podIP"]
    given = json.dumps({"address": address, "port": MANAGEMENT[component], "pair": pair[0] if pair else None})
    answer: Json = json.loads(visitor.kubectl.run("exec", *visitor.where, "--", "python", "-c", ASK_MANAGEMENT, given))
    return answer


@pytest.mark.parametrize("component", [ROUTER, WORKER])
def test_strangers_pod_gets_health_and_nothing_else_of_the_management_port(
    secured: Installation, stranger: Visitor, authority: Authority, component: str
) -> None:
    state = "/status" if component == ROUTER else "/metrics"
    nothing = {"/healthz": 200, "/readyz": 200, "/metrics": 403, "/status": 403}
    assert statuses(stranger, secured, component) == nothing | {"plain text": "refused"}
    own = shown(authority, "operator.test")
    answered = statuses(stranger, secured, component, own)
    assert (answered["/metrics"], answered[state]) == (200, 200)
    foreign = shown(Authority(), "operator.test")
    assert set(statuses(stranger, secured, component, foreign).values()) == {"refused"}


def test_renewed_certificates_are_used_without_a_restart(
    secured: Installation, stranger: Visitor, authority: Authority, report: Report
) -> None:
    before = {pod.name: pod.uid for pod in secured.release.pods()}
    ways = ((WORKER, GRPC, "worker"), (ROUTER, HTTP, "router"))
    old = {component: ask(stranger, secured, component, port, authority)["shown"] for component, port, _ in ways}
    for *_, name in ways:
        write_secret(secured.kubectl, authority, name)
    for component, port, _ in ways:
        wait_for(
            lambda component=component, port=port: (
                ask(stranger, secured, component, port, authority)["shown"] not in (old[component], "SSLError")
            ),
            f"{component} shows its new certificate",
            _SYNC_S,
            every_s=3.0,
        )
    assert {pod.name: pod.uid for pod in secured.release.pods()} == before
    assert all(pod.restarts == 0 for pod in secured.release.pods())
    test_release_with_tls_serves(secured)
