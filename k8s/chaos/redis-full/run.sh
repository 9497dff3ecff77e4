#!/usr/bin/env bash
# Fills Redis up to its maxmemory for SECONDS_FULL, from a state server's pod, then empties it again.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
STATE=${STATE:-$(first kv-state-server)}
k exec -i "$STATE" -c state -- python - "${SECONDS_FULL:-15}" "${MOST_MIB:-1024}" <"$(dirname "${BASH_SOURCE[0]}")/fill.py"
