#!/usr/bin/env bash
# Replaces every worker, one at a time, as a new image or a new setting does.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
workers=$(k get statefulsets -l "app.kubernetes.io/instance=$RELEASE,app.kubernetes.io/component=inference-worker" -o name)
fault
k rollout restart $workers
for each in $workers; do k rollout status "$each" --timeout="${PATIENCE_S}s"; done
