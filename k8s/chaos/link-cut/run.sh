#!/usr/bin/env bash
# Drops every packet between one router and one worker for SECONDS, on open connections too. Both reach all other pods.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
WORKER=${WORKER:-$(first inference-worker)}
ROUTER=${ROUTER:-$(first router)}
here=$(pod_field "$WORKER" .status.podIP) there=$(pod_field "$ROUTER" .status.podIP)
drop "$(pod_field "$WORKER" .spec.nodeName)" "${SECONDS_CUT:-10}" "FORWARD -s $here -d $there" "FORWARD -s $there -d $here"
