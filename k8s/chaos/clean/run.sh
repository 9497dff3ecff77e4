#!/usr/bin/env bash
# Undoes what interrupted experiments have left of this release, a line for each thing. Prints nothing when there is nothing.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
cutters() { kubectl -n "$CUTTERS" get pods -l "$1" --ignore-not-found -o name; }

for pod in $(k get pods -l "$LABEL=$RELEASE" -o name); do
  k delete "$pod" --ignore-not-found --grace-period=1 >/dev/null
  echo "deleted $pod"
done

entries=$(remembered)
while read -r key value; do
  [[ -n $key ]] || continue
  node=${key#*.}
  case $key in
    cut.* | cordon.*)
      found=$(kubectl get node "$node" --ignore-not-found -o name) # if it fails this ends, and the record stays
      if [[ -z $found ]]; then
        echo "node $node is gone"
      elif [[ $key == cordon.* ]]; then
        kubectl uncordon "$node"
      else
        # A cut that still runs removes its rules as it ends.
        kubectl -n "$CUTTERS" delete pod "cut-$OWN-$node" "undo-$OWN-$node" --ignore-not-found --timeout="${PATIENCE_S}s" >/dev/null
        iptables_pod "undo-$OWN-$node" "$node" "$value" 0 ""
        ended "$CUTTERS" "undo-$OWN-$node"
        echo "$node: no rule is left"
      fi ;;
    stop.*)
      # Whatever became of the process, a new pod runs.
      k delete pod "$node" --ignore-not-found --grace-period=0 --force >/dev/null 2>&1
      echo "deleted pod $node, which may have been stopped" ;;
    revision)
      if ! status=$(helm status "$RELEASE" -n "$NAMESPACE" -o yaml 2>&1); then
        # Else it is not known, and the record stays.
        [[ $status == *"release: not found"* ]] || { echo "helm does not tell the revision of $RELEASE: $status" >&2; exit 1; }
        status="version: 0"
        echo "release $RELEASE is gone"
      fi
      now=$(sed -n 's/^version: //p' <<<"$status")
      # The upgrade made one revision, and its rollback may have begun another. Newer ones are somebody else's.
      if ((now > value + 2)) || { ((now == value + 2)) && ! grep -Eq '^  status: (pending|failed)' <<<"$status"; }; then
        echo "revision $now is newer than the experiment's: not rolled back"
      elif ((now > value)); then
        helm rollback "$RELEASE" "$value" -n "$NAMESPACE" --wait --timeout "${PATIENCE_S}s" >/dev/null
        echo "rolled back to revision $value"
      fi ;;
  esac
  forget "$key"
done <<<"$entries"
k delete configmap "$RECORD" --ignore-not-found >/dev/null

made_by=$(cutters_made_by)
if [[ $made_by == "$CUTTERS lockstep-chaos" ]]; then # else it has another owner, whatever is in it
  for pod in $(cutters "$LABEL=$RELEASE,$RELEASE_NAMESPACE=$NAMESPACE"); do
    kubectl -n "$CUTTERS" delete "$pod" --ignore-not-found >/dev/null
  done
  if [[ -z $(cutters "$LABEL") ]]; then # another release's cut may run there
    kubectl delete namespace "$CUTTERS" --timeout="${PATIENCE_S}s" >/dev/null
    echo "deleted namespace $CUTTERS"
  fi
fi
