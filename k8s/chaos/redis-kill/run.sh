#!/usr/bin/env bash
# Deletes the pod of the bundled Redis without grace: all that is in it is lost.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
REDIS=${REDIS:-$(first redis)}
fault
k delete pod "$REDIS" --grace-period=0 --force --wait=false
