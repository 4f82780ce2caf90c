#!/usr/bin/env bash
# warm-cache.sh IMAGE CONFIG MODELS [OUT]: starts IMAGE with the Serve configuration CONFIG and the directory MODELS on a
# machine with the GPU in question, waits until it serves, and takes the kernels that Triton compiled to OUT
# (cluster/docker/triton-cache), from where the next build of the target cuda puts them into the image.
set -euo pipefail
image="$1" config="$(realpath "$2")" models="$(realpath "$3")" out="${4:-cluster/docker/triton-cache}"
id=$(docker run --detach --gpus all --shm-size 8g --ulimit nofile=1048576:1048576 \
  --volume "$config:/etc/manta/serve.yaml:ro" --volume "$models:/models:ro" "$image" manta serve /etc/manta/serve.yaml)
trap 'docker rm --force "$id" > /dev/null' EXIT
for _ in $(seq 360); do
  if docker exec "$id" manta-health 2> /dev/null; then
    docker cp "$id:/opt/manta/triton-cache/." "$out"
    exit 0
  fi
  [ "$(docker inspect --format '{{.State.Running}}' "$id")" = true ] || { docker logs --tail 50 "$id"; exit 1; }
  sleep 5
done
echo "not healthy after half an hour" >&2
exit 1
