#!/usr/bin/env bash
# Sends more streams at a time than the workers may run and queue. Prints the report of the burst's clients, as a line of JSON.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
BURST=${BURST:-800}
LOAD_LIMIT_S=$PATIENCE_S
api=$(api_url)
k delete pod lockstep-burst --ignore-not-found >/dev/null
trap 'k delete pod lockstep-burst --ignore-not-found --wait=false >/dev/null' EXIT
fault
client_pod lockstep-burst "" bench "--url=$api" "--clients=$BURST" "--requests=$((2 * BURST))" --max-tokens=24 --prompt-tokens=16 --json
ended "$NAMESPACE" lockstep-burst # as failed when a request was refused, which is expected
echo "burst $(k logs lockstep-burst | tr -d '\n')"
