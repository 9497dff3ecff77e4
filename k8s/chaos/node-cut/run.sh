#!/usr/bin/env bash
# Cuts the node of a worker off from everything for SECONDS, then lets it rejoin. Nothing on it is killed.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
WORKER=${WORKER:-$(first inference-worker)}
drop "${NODE:-$(pod_field "$WORKER" .spec.nodeName)}" "${SECONDS_CUT:-20}" "PREROUTING -i DEV" "POSTROUTING -o DEV"
