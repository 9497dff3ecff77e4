#!/usr/bin/env bash
# Kills one rank inside a worker's pod.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
WORKER=${WORKER:-$(first inference-worker)}
signal_rank KILL
