#!/usr/bin/env bash
# Stops one rank inside a worker's pod: it keeps its memory and its sockets, but does not run.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
WORKER=${WORKER:-$(first inference-worker)}
signal_rank STOP
