#!/usr/bin/env bash
# Deletes a worker's pod as `kubectl delete` does: SIGTERM, a drain, and the rest handed over.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
WORKER=${WORKER:-$(first inference-worker)}
fault
k delete pod "$WORKER" --wait=false
