#!/usr/bin/env bash
# Deletes a worker's pod without grace: its containers are killed about a second later.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
WORKER=${WORKER:-$(first inference-worker)}
fault
k delete pod "$WORKER" --grace-period=0 --force --wait=false
