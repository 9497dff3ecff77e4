# Sourced by every experiment: the release, its pods, and pods that act on it. Needs kubectl and nothing else.
#   NAMESPACE, RELEASE   where the release is (default: the context's namespace, lockstep)
#   WORKER, ROUTER       pods to be disturbed (default: the first that is ready)
#   IMAGE                the tools' image (default: beside the router's)
set -euo pipefail

NAMESPACE=${NAMESPACE:-$(kubectl config view --minify -o jsonpath='{..namespace}')}
NAMESPACE=${NAMESPACE:-default}
RELEASE=${RELEASE:-lockstep}
PATIENCE_S=${PATIENCE_S:-300} # for anything that Kubernetes has to finish
CUTTERS=lockstep-chaos     # namespace of the privileged pods that cut networks

k() { kubectl -n "$NAMESPACE" "$@"; }

# The moment of the fault, for whoever measures: the last such line counts.
fault() { date '+fault %s.%N'; }

# The first ready pod of a component: router or inference-worker.
first() {
  k get pods -l "app.kubernetes.io/instance=$RELEASE,app.kubernetes.io/component=$1" \
    -o jsonpath='{range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}' |
    awk '$2 == "True" {print $1; found = 1; exit} END {if (!found) exit 1}' ||
    { echo "no $1 of release $RELEASE is ready in namespace $NAMESPACE" >&2; return 1; }
}

# A field of a pod: pod_field POD .spec.nodeName
pod_field() { k get pod "$1" -o "jsonpath={$2}"; }

# Waits until a pod has ended, well or not: ended NAMESPACE POD
ended() {
  local limit=$((SECONDS + PATIENCE_S))
  until [[ $(kubectl -n "$1" get pod "$2" -o jsonpath='{.status.phase}') =~ Succeeded|Failed ]]; do
    ((SECONDS < limit)) || { echo "pod $2 has not ended in $PATIENCE_S s" >&2; return 1; }
    sleep 1
  done
}

# Sends a signal to a rank: a process in the worker's container, owned by the same user as the shell that `exec` starts there.
signal_rank() { # signal
  k exec "$WORKER" -c worker -- sh -c '
    for process in /proc/[0-9]*; do
      case "$(tr "\0" " " 2>/dev/null <"$process/cmdline")" in
        "lockstep: rank "*) date "+fault %s.%N"; kill "-$0" "${process#/proc/}"; exit ;;
      esac
    done
    echo "no rank runs in this pod" >&2; exit 1' "$1"
}

# Runs the release's `lockstep` command in a pod that policies know as a load: client_pod NAME "NODES TO AVOID" ARGUMENT...
client_pod() {
  local name=$1 avoid=$2 router; shift 2
  router=$(first router)
  : "${IMAGE:=$(pod_field "$router" '.spec.containers[?(@.name=="router")].image' | sed 's|/router\([:@]\)|/tools\1|')}"
  k apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata:
  name: $name
  labels:
    app.kubernetes.io/name: $(pod_field "$router" '.metadata.labels.app\.kubernetes\.io/name')
    app.kubernetes.io/instance: $RELEASE
    app.kubernetes.io/component: load
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 60
  imagePullSecrets: [$(pod_field "$router" '.spec.imagePullSecrets[*]' | sed 's/} {/}, {/g')]
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
          - matchExpressions: [{key: kubernetes.io/hostname, operator: NotIn, values: [none, ${avoid// /, }]}]
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: load
      image: $IMAGE
      args: [$(printf '"%s",' "$@")]
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      resources:
        requests: {cpu: 100m, memory: 96Mi}
        limits: {memory: 512Mi}
      volumeMounts: [{name: tmp, mountPath: /tmp}]
  volumes: [{name: tmp, emptyDir: {}}]
POD
}

# The API's address by cluster IP: a load that loses its DNS would tell nothing of the release.
api_url() {
  k get service -l "app.kubernetes.io/instance=$RELEASE,app.kubernetes.io/component=router" \
    -o jsonpath='http://{.items[0].spec.clusterIP}:{.items[0].spec.ports[?(@.name=="http")].port}/v1'
}

# Drops packets in a node's own network namespace for SECONDS, then lets them pass again: drop NODE SECONDS "RULE" "RULE"
# A RULE is what iptables takes after `-t mangle -I`; DEV in it is the node's way out. Mangle comes before connection
# tracking's verdict, so open connections are cut too. The pod takes the rules back itself: nobody may reach it by then.
drop() {
  local node=$1 seconds=$2 name="cut-$RELEASE-$1" rules; shift 2
  rules=$(printf '%s;' "$@")
  kubectl create namespace "$CUTTERS" --dry-run=client -o yaml |
    kubectl label --local -f - pod-security.kubernetes.io/enforce=privileged -o yaml | kubectl apply -f - >/dev/null
  : "${IMAGE:=$(pod_field "$(first router)" '.spec.containers[?(@.name=="router")].image')}"
  kubectl -n "$CUTTERS" apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata: {name: $name}
spec:
  nodeName: $node
  restartPolicy: Never
  hostNetwork: true
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 5
  tolerations: [{operator: Exists}]
  containers:
    - name: cut
      image: $IMAGE
      securityContext: {privileged: true, runAsUser: 0}
      command: [chroot, /host, /bin/sh, -ec]
      args:
        - |
          command -v iptables >/dev/null || { echo "this node has no iptables"; exit 1; }
          DEV=\$(awk '\$2 == "00000000" {print \$1; exit}' /proc/net/route)
          each() { echo '$rules' | tr ';' '\n' | sed "/^\$/d; s/DEV/\$DEV/; s/^/iptables -w -t mangle \$1 /" | sh -e; }
          trap 'each -D; date "+joined %s.%N"' EXIT
          trap 'exit 1' TERM INT
          each -I
          date "+fault %s.%N"
          sleep $seconds & wait
      volumeMounts: [{name: host, mountPath: /host}]
  volumes: [{name: host, hostPath: {path: /}}]
POD
  ended "$CUTTERS" "$name"
  kubectl -n "$CUTTERS" logs "$name"
  local phase; phase=$(kubectl -n "$CUTTERS" get pod "$name" -o jsonpath='{.status.phase}')
  kubectl -n "$CUTTERS" delete pod "$name" --wait=false >/dev/null
  [[ $phase == Succeeded ]]
}
