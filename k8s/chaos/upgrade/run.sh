#!/usr/bin/env bash
# Upgrades the release to the same chart with another annotation on every pod, then rolls it back. Needs helm.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
CHART=${CHART:-$(dirname "${BASH_SOURCE[0]}")/../../../charts/lockstep}
revision=$(revision)
remember revision "$revision"
fault
helm upgrade "$RELEASE" "$CHART" -n "$NAMESPACE" --reset-then-reuse-values --set-string "commonAnnotations.lockstep\.dev/upgraded=$(date +%s)" \
  --wait --timeout "${PATIENCE_S}s" >/dev/null
echo "upgraded"
helm rollback "$RELEASE" "$revision" -n "$NAMESPACE" --wait --timeout "${PATIENCE_S}s"
forget revision
