#!/usr/bin/env bash
# Deletes a state server's pod without grace.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
STATE=${STATE:-$(first kv-state-server)}
fault
k delete pod "$STATE" --grace-period=0 --force --wait=false
