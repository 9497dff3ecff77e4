#!/usr/bin/env bash
# Replaces every router, as a new image or a new setting does.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
routers=$(k get deployments -l "app.kubernetes.io/instance=$RELEASE,app.kubernetes.io/component=router" -o name)
fault
k rollout restart $routers
for each in $routers; do k rollout status "$each" --timeout="${PATIENCE_S}s"; done
