#!/usr/bin/env bash
# manta-leave-node [SECONDS]: take this node out of its Ray cluster without cutting a request. What stops a node runs it
# first: the pod's preStop, the systemd unit, the shutdown hook of a spot instance. Ray starts the replicas' replacements
# elsewhere, engine replicas hand their requests on, an ingress ends its streams; it returns once no Serve replica is
# left here, or after SECONDS, when whoever asked will kill the node.
set -u
deadline="${1:-600}"
proc="${MANTA_PROC:-/proc}" # a test puts another one in its place
export RAY_ADDRESS="${RAY_ADDRESS:-auto}"

replicas() {  # processes of Serve replicas on this node; Ray names them in their command lines
  grep -lz 'ray::ServeReplica:' "$proc"/[0-9]*/cmdline 2>/dev/null | wc -l
}

ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the node is being stopped" \
  --deadline-remaining-seconds "$deadline" || exit 1
end=$((SECONDS + deadline))
while [ "$SECONDS" -lt "$end" ] && [ "$(replicas)" -gt 0 ]; do
  sleep 1
done
exit 0
