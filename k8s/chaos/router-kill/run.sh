#!/usr/bin/env bash
# Deletes a router's pod without grace: only its own streams break off.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
ROUTER=${ROUTER:-$(first router)}
fault
k delete pod "$ROUTER" --grace-period=0 --force --wait=false
