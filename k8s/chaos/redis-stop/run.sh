#!/usr/bin/env bash
# Stops the bundled Redis for SECONDS_STOPPED: it keeps its connections and accepts new ones, but answers nothing. Then it continues.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
REDIS=${REDIS:-$(first redis)}
freeze "$REDIS" redis "${SECONDS_STOPPED:-15}"
