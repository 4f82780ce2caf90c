#!/usr/bin/env bash
# The head of a Ray cluster on machines of your own. Settings come from the environment (manta.env.example). It runs no
# replica: its loss then costs nothing, as long as Redis keeps what the GCS knows.
set -euo pipefail
: "${RAY_AUTH_MODE:?set to token, in manta.env}" "${MANTA_NODE_IP:?the address of this machine that the others reach}"
redis=()
if [ -n "${RAY_REDIS_ADDRESS:-}" ]; then
  : "${REDIS_PASSWORD:?Redis without a password is open to whoever reaches it}"
  : "${MANTA_BLOCK_HASH_KEY_FILE:?else the key of the block hashes lies in Redis in clear}"
  redis=(--redis-password "$REDIS_PASSWORD")
fi
exec ray start --head --block --node-ip-address "$MANTA_NODE_IP" --port 6379 --num-cpus 0 --num-gpus 0 \
  --dashboard-host 127.0.0.1 --dashboard-port 8265 --ray-client-server-port 10001 \
  --object-manager-port 10100 --node-manager-port 10101 --runtime-env-agent-port 10102 \
  --dashboard-agent-grpc-port 10103 --dashboard-agent-listen-port 52365 --metrics-export-port 8080 \
  --min-worker-port 11000 --max-worker-port 19999 "${redis[@]}"
