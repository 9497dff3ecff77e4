# Sourced by every experiment: the release, its pods, pods that act on it, and the record of what has to be undone.
# Needs kubectl and nothing else.
#   NAMESPACE, RELEASE   where the release is (default: the context's namespace, lockstep)
#   WORKER, ROUTER, STATE, REDIS
#                        pods to be disturbed (default: the first that is ready)
#   IMAGE                the tools' image (default: beside the router's)
#   LOCKSTEP_API_KEY     the load's key, if the routers have keys
#   PARENT               process that runs this script; the script ends when it is gone
set -euo pipefail

NAMESPACE=${NAMESPACE:-$(kubectl config view --minify -o jsonpath='{..namespace}')}
NAMESPACE=${NAMESPACE:-default}
RELEASE=${RELEASE:-lockstep}
PATIENCE_S=${PATIENCE_S:-300} # for anything that Kubernetes has to finish
LOAD_LIMIT_S=${LOAD_LIMIT_S:-14400} # Kubernetes ends a load after this time
LABEL=lockstep.dev/chaos # on all that experiments create; its value is the release
RECORD=lockstep-chaos-$RELEASE # ConfigMap beside the release: what an experiment has changed and not undone yet
CUTTERS=lockstep-chaos # namespace of the privileged pods that cut networks
RELEASE_NAMESPACE=lockstep.dev/release-namespace # label of the pods that cut networks; its value is the release's namespace
OWN=$(printf %s "$NAMESPACE/$RELEASE" | cksum | cut -d' ' -f1) # in names outside of the release's namespace
CHAIN=LOCKSTEP-$OWN # of iptables

trap 'exit 143' TERM INT HUP # so that EXIT traps run
if [[ -n ${PARENT:-} ]]; then # they share no terminal, so nothing else would end this script
  (while kill -0 "$PARENT" && kill -0 $$; do sleep 1; done; kill -TERM -- -$$) >/dev/null 2>&1 </dev/null &
fi

k() { kubectl -n "$NAMESPACE" "$@"; }

# Prints the time of the fault for the caller, who uses the last such line.
fault() { date '+fault %s.%N'; }

# Writes into the record what has to be undone, before it is done: remember KEY VALUE
remember() {
  k get configmap "$RECORD" -o name >/dev/null 2>&1 || k create configmap "$RECORD" >/dev/null
  k patch configmap "$RECORD" --type=merge -p \
    "{\"metadata\":{\"labels\":{\"$LABEL\":\"$RELEASE\"}},\"data\":{\"$1\":\"$2\"}}" >/dev/null
}

# Removes a key from the record, once it is undone.
forget() { k patch configmap "$RECORD" --type=merge -p "{\"data\":{\"$1\":null}}" >/dev/null; }

# The record, a line for each key: KEY VALUE
remembered() {
  k get configmap "$RECORD" --ignore-not-found -o go-template='{{range $key, $value := .data}}{{$key}} {{$value}}{{"\n"}}{{end}}'
}

# The first ready pod of a component: router, inference-worker, kv-state-server or redis.
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
# With LOCKSTEP_API_KEY it sends this key to the routers. With TLS it trusts the routers' authority, and shows the routers' own certificate,
# as their status wants one.
client_pod() {
  local name=$1 avoid=$2 router environment= service secrets= tls=/etc/lockstep-tls; shift 2
  if [[ -n ${LOCKSTEP_API_KEY:-} ]]; then
    environment="{name: LOCKSTEP_API_KEY, valueFrom: {secretKeyRef: {name: $name, key: api-key}}}"
  fi
  router=$(first router)
  : "${IMAGE:=$(pod_field "$router" '.spec.containers[?(@.name=="router")].image' | sed 's|/router\([:@]\)|/tools\1|')}"
  service=($(api_service))
  local own; own=$(secret_of "$router" tls)
  if [[ -n $own ]]; then
    local http; http=$(secret_of "$router" http-tls)
    secrets="{secret: {name: $own}}, {secret: {name: ${http:-$own}, items: [{key: ca.crt, path: http-ca.crt}]}}"
    set -- "$@" --ca-file=$tls/ca.crt --ca-file=$tls/http-ca.crt --client-cert=$tls/tls.crt --client-key=$tls/tls.key
  fi
  k apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata:
  name: $name
  labels:
    app.kubernetes.io/name: $(pod_field "$router" '.metadata.labels.app\.kubernetes\.io/name')
    app.kubernetes.io/instance: $RELEASE
    app.kubernetes.io/component: load
    $LABEL: $RELEASE
spec:
  activeDeadlineSeconds: $LOAD_LIMIT_S
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 60
  imagePullSecrets: [$(pod_field "$router" '.spec.imagePullSecrets[*]' | sed 's/} {/}, {/g')]
  hostAliases: [{ip: "${service[2]}", hostnames: ["${service[1]}"]}]
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
      env: [$environment]
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      resources:
        requests: {cpu: 100m, memory: 96Mi}
        limits: {memory: 512Mi}
      volumeMounts: [{name: tmp, mountPath: /tmp}, {name: tls, mountPath: $tls, readOnly: true}]
  volumes: [{name: tmp, emptyDir: {sizeLimit: 64Mi}}, {name: tls, projected: {sources: [$secrets]}}]
POD
  if [[ -n ${LOCKSTEP_API_KEY:-} ]]; then give_key "$name"; fi
}

# Stores LOCKSTEP_API_KEY as a Secret of a pod, which waits for it: Kubernetes deletes the Secret with the pod. The key is in no command
# line: give_key POD
give_key() {
  local uid; uid=$(pod_field "$1" .metadata.uid)
  k apply -f - >/dev/null <<SECRET
apiVersion: v1
kind: Secret
metadata:
  name: $1
  labels: {$LABEL: $RELEASE}
  ownerReferences: [{apiVersion: v1, kind: Pod, name: $1, uid: "$uid"}]
data: {api-key: "$(printf %s "$LOCKSTEP_API_KEY" | base64 | tr -d '\n')"}
SECRET
}

# The newest revision of the release, by helm.
revision() { helm status "$RELEASE" -n "$NAMESPACE" -o yaml | sed -n 's/^version: //p'; }

# The API's address, by the name that the routers' certificate has. `client_pod` gives this name its cluster IP: a load that had to ask a
# DNS server would not test the release. Call it in an assignment: only there does bash end a script whose `$(…)` fails.
api_url() {
  local found; found=$(api_service) || return 1
  set -- $found
  echo "$1://$2:$4/v1"
}

# The address of the routers' status, by cluster IP. Its certificate has the same name as the API's.
management_url() {
  local found; found=$(routers_service lockstep.dev/service=management management) || return 1
  set -- $found
  if [[ $3 == *:* ]]; then set -- "$1" "$2" "[$3]" "$4"; fi # of IPv6
  echo "$1://$3:$4"
}

api_service() { routers_service 'lockstep.dev/service!=management' http; }

# A Service of the routers, as SCHEME NAME CLUSTER-IP NUMBER: routers_service SELECTOR PORT
routers_service() {
  local selector="app.kubernetes.io/instance=$RELEASE,app.kubernetes.io/component=router,$1" item='.items[0]' port
  port="$item.spec.ports[?(@.name==\"$2\")]"
  k get service -l "$selector" -o jsonpath="{$port.appProtocol} {$item.metadata.name}.$NAMESPACE.svc {$item.spec.clusterIP} {$port.port}"
}

# The Secret of a pod's volume, or nothing: secret_of POD VOLUME
secret_of() { pod_field "$1" ".spec.volumes[?(@.name==\"$2\")].secret.secretName"; }

# Drops packets in a node's own network namespace for SECONDS, then lets them pass again: drop NODE SECONDS "MATCH" "MATCH"
# A MATCH is what iptables takes between `-t mangle -I` and `-j`; DEV in it is the node's way out. The mangle table comes before
# connection tracking, so open connections are cut too. The pod removes the rules itself, since it may not be reachable by then.
# It counts what they have dropped: heartbeats pass all the time, so a count of 0 says that nothing was cut.
drop() {
  local node=$1 seconds=$2 name="cut-$OWN-$1" matches said; shift 2
  matches=$(printf '%s;' "$@")
  need_cutters # before anything is recorded that could not be undone
  : "${IMAGE:=$(pod_field "$(first router)" '.spec.containers[?(@.name=="router")].image')}"
  remember "cut.$node" "$IMAGE"
  iptables_pod "$name" "$node" "$IMAGE" "$seconds" "$matches"
  ended "$CUTTERS" "$name"
  said=$(kubectl -n "$CUTTERS" logs "$name")
  echo "$said"
  [[ $said == *joined* ]] || { echo "the cut of $node did not run to its end" >&2; return 1; }
  forget "cut.$node"
  kubectl -n "$CUTTERS" delete pod "$name" --wait=false >/dev/null
  [[ $said != *"dropped 0 packets"* ]] ||
    { echo "the cut of $node dropped no packet: this cluster's network does not pass the node's iptables" >&2; return 1; }
}

# The owner of the namespace of the privileged pods: a line `CUTTERS MANAGED-BY`, or nothing if it is not there.
cutters_made_by() {
  kubectl get namespace "$CUTTERS" --ignore-not-found \
    -o 'jsonpath={.metadata.name} {.metadata.labels.app\.kubernetes\.io/managed-by}'
}

# Makes the namespace of the privileged pods. `clean` deletes it, so an existing one of another owner is refused and left unchanged.
need_cutters() {
  local found; found=$(cutters_made_by)
  if [[ -z $found ]]; then
    kubectl create namespace "$CUTTERS" --dry-run=client -o yaml |
      kubectl label --local -f - pod-security.kubernetes.io/enforce=privileged app.kubernetes.io/managed-by=lockstep-chaos -o yaml |
      kubectl create -f - >/dev/null || true # another release's experiment may have been first
    found=$(cutters_made_by)
    [[ -n $found ]] || return 1 # kubectl has printed the reason
  fi
  [[ $found == "$CUTTERS lockstep-chaos" ]] ||
    { echo "namespace $CUTTERS, which experiments make and delete, was not made by them (no label app.kubernetes.io/managed-by=lockstep-chaos): remove it first" >&2; return 1; }
}

# Runs a privileged pod on a node with the node's own iptables: iptables_pod NAME NODE IMAGE SECONDS "MATCH;MATCH;"
# It starts by removing rules that an earlier cut has left, and does nothing more then. So a container that is killed before it has
# removed its rules removes them when the kubelet starts it again, even on a node that is cut off. SECONDS 0 only removes.
iptables_pod() {
  local name=$1 node=$2 image=$3 seconds=$4 matches=$5
  need_cutters
  kubectl -n "$CUTTERS" apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata:
  name: $name
  labels: {$LABEL: $RELEASE, $RELEASE_NAMESPACE: $NAMESPACE}
spec:
  nodeName: $node
  restartPolicy: OnFailure
  activeDeadlineSeconds: $((seconds + PATIENCE_S))
  hostNetwork: true
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 30
  tolerations: [{operator: Exists}]
  containers:
    - name: cut
      image: $image
      imagePullPolicy: IfNotPresent
      securityContext: {privileged: true, runAsUser: 0}
      command: [chroot, /host, /bin/sh, -ec]
      args:
        - |
          command -v iptables >/dev/null || { echo "this node has no iptables"; exit 0; }
          table() { iptables -w -t mangle "\$@"; }
          undo() {
            table -S | sed -n 's/^-A \(.* -j $CHAIN\)\$/\1/p' | while read -r rule; do table -D \$rule; done
            table -F $CHAIN
            table -X $CHAIN
          }
          if table -n -L $CHAIN >/dev/null 2>&1; then undo; echo "removed rules that a cut had left"; exit 0; fi
          [ $seconds -gt 0 ] || exit 0
          DEV=\$(awk '\$2 == "00000000" {print \$1; exit}' /proc/net/route)
          counted() { table -n -v -x -L $CHAIN | awk '\$3 == "DROP" {print "dropped " \$1 " packets"}'; }
          trap 'count=\$(counted) || true; undo; echo "\$count"; date "+joined %s.%N"' EXIT
          trap 'exit 1' TERM INT
          table -N $CHAIN
          table -A $CHAIN -j DROP
          echo '$matches' | tr ';' '\n' | sed "/^\$/d; s/DEV/\$DEV/" | while read -r match; do table -I \$match -j $CHAIN; done
          date "+fault %s.%N"
          sleep $seconds & wait
      volumeMounts: [{name: host, mountPath: /host}]
  volumes: [{name: host, hostPath: {path: /}}]
POD
}

# Stops the processes of a container for SECONDS, then lets them continue: freeze POD CONTAINER SECONDS
# A pod on its node does it: inside of a container the kernel ignores SIGSTOP for the first process.
freeze() {
  local pod=$1 container=$2 seconds=$3 name="stop-$OWN-$1" id said
  id=$(pod_field "$pod" ".status.containerStatuses[?(@.name==\"$container\")].containerID")
  [[ -n $id ]] || { echo "container $container of $pod does not run" >&2; return 1; }
  need_cutters
  : "${IMAGE:=$(pod_field "$(first router)" '.spec.containers[?(@.name=="router")].image')}"
  remember "stop.$pod" "$container"
  freezer_pod "$name" "$(pod_field "$pod" .spec.nodeName)" "$IMAGE" "${id##*/}" "$seconds"
  ended "$CUTTERS" "$name"
  said=$(kubectl -n "$CUTTERS" logs "$name")
  echo "$said"
  [[ $said == *continued* ]] || { echo "$pod was not stopped, or does not continue" >&2; return 1; }
  forget "stop.$pod"
  kubectl -n "$CUTTERS" delete pod "$name" --wait=false >/dev/null
}

# Runs a privileged pod on a node that stops the processes of a container: freezer_pod NAME NODE IMAGE CONTAINER-ID SECONDS
# If it finds them stopped, it lets them continue and does nothing more: its container was killed, and the kubelet has started it again.
freezer_pod() {
  local name=$1 node=$2 image=$3 id=$4 seconds=$5
  kubectl -n "$CUTTERS" apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata:
  name: $name
  labels: {$LABEL: $RELEASE, $RELEASE_NAMESPACE: $NAMESPACE}
spec:
  nodeName: $node
  restartPolicy: OnFailure
  activeDeadlineSeconds: $((seconds + PATIENCE_S))
  hostPID: true
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 30
  tolerations: [{operator: Exists}]
  containers:
    - name: stop
      image: $image
      imagePullPolicy: IfNotPresent
      securityContext: {privileged: true, runAsUser: 0}
      command: [/bin/sh, -ec]
      args:
        - |
          processes=
          for each in \$(grep -ls "$id" /proc/[0-9]*/cgroup); do each=\${each#/proc/}; processes="\$processes \${each%/cgroup}"; done
          [ -n "\$processes" ] || { echo "no process of the container is on this node"; exit 0; }
          undo() { kill -CONT \$processes; date "+continued %s.%N"; }
          for each in \$processes; do
            if grep -qs "^State:[[:space:]]*T" "/proc/\$each/status"; then undo; exit 0; fi
          done
          trap undo EXIT
          trap 'exit 1' TERM INT
          kill -STOP \$processes
          date "+fault %s.%N"
          sleep $seconds & wait
POD
}
