#!/usr/bin/env bash
# Drains the node of a worker, then takes it back. SELECTOR= (empty) evicts the other tenants of the node too.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
WORKER=${WORKER:-$(first inference-worker)}
NODE=${NODE:-$(pod_field "$WORKER" .spec.nodeName)}
trap 'kubectl uncordon "$NODE"' EXIT
fault
kubectl drain "$NODE" --ignore-daemonsets --delete-emptydir-data --timeout="${PATIENCE_S}s" \
  --pod-selector="${SELECTOR-app.kubernetes.io/instance=$RELEASE,app.kubernetes.io/component!=load}"
