#!/usr/bin/env bash
# A worker of a Ray cluster on machines of your own: start-worker.sh [further options of `ray start`].
set -euo pipefail
: "${RAY_AUTH_MODE:?set to token, in manta.env}" "${MANTA_NODE_IP:?the address of this machine that the others reach}"
: "${MANTA_HEAD:?address:port of the head, 10.0.0.5:6379}"
exec ray start --block --address "$MANTA_HEAD" --node-ip-address "$MANTA_NODE_IP" \
  --object-manager-port 10100 --node-manager-port 10101 --runtime-env-agent-port 10102 \
  --dashboard-agent-grpc-port 10103 --dashboard-agent-listen-port 52365 --metrics-export-port 8080 \
  --min-worker-port 11000 --max-worker-port 19999 "$@"
