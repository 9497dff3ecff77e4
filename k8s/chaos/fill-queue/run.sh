#!/usr/bin/env bash
# Sends more streams at a time than the workers may run and queue. Prints what the burst's own clients got, as a line of JSON.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
BURST=${BURST:-800}
k delete pod lockstep-burst --ignore-not-found >/dev/null
fault
client_pod lockstep-burst "" bench "--url=$(api_url)" "--clients=$BURST" "--requests=$((2 * BURST))" --max-tokens=24 --prompt-tokens=16 --json
ended "$NAMESPACE" lockstep-burst # as failed, when anything was refused; that is the idea
echo "burst $(k logs lockstep-burst | tr -d '\n')"
k delete pod lockstep-burst --wait=false >/dev/null
