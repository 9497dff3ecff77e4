#!/usr/bin/env bash
# Starts a pod with steady streams; each one's history is a line in its log. AVOID: nodes that will be disturbed. RESUME: streams survive routers that die.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
api=$(api_url)
management=$(management_url)
client_pod "${POD:-lockstep-load}" "${AVOID:-}" load "--url=$api" "--management-url=$management" "--clients=${CLIENTS:-8}" ${RESUME:+--resume} --until-signal
