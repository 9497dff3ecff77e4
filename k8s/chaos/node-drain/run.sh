#!/usr/bin/env bash
# Drains the node of a worker, then takes it back. SELECTOR= (empty) evicts the other pods of the node too.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
WORKER=${WORKER:-$(first inference-worker)}
NODE=${NODE:-$(pod_field "$WORKER" .spec.nodeName)}
SELECTOR=${SELECTOR-app.kubernetes.io/instance=$RELEASE,app.kubernetes.io/component!=load}
[[ $(kubectl get node "$NODE" -o jsonpath='{.spec.unschedulable}') != true ]] || { echo "$NODE is cordoned already" >&2; exit 1; }
remember "cordon.$NODE" true
trap 'kubectl uncordon "$NODE" && forget "cordon.$NODE"' EXIT
# `kubectl drain` selects pods in all namespaces, and a release of the same name may be in another one: it gets a label of this release's own.
if [[ -n $SELECTOR ]]; then
  k label pods -l "$SELECTOR" --field-selector "spec.nodeName=$NODE" --overwrite "lockstep.dev/drained=$OWN" >/dev/null
  SELECTOR=lockstep.dev/drained=$OWN
fi
fault
kubectl drain "$NODE" --ignore-daemonsets --delete-emptydir-data --timeout="${PATIENCE_S}s" \
  --pod-selector="$SELECTOR"
