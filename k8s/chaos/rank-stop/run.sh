#!/usr/bin/env bash
# Stops one rank inside a worker's pod: it lives, holds its memory and its sockets, and does nothing any more.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
WORKER=${WORKER:-$(first inference-worker)}
signal_rank STOP
