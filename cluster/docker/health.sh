#!/bin/sh
# manta-health: whether this container does its work. With a Serve proxy: a replica of every model can make progress. In a
# container that is only a node of a Ray cluster: its raylet lives.
port="${MANTA_PORT:-8000}"
if wget -q -T 4 -O /dev/null "http://127.0.0.1:$port/health"; then exit 0; fi
if wget -q -T 4 -O /dev/null "http://127.0.0.1:$port/-/healthz"; then exit 1; fi # served, but not healthy
wget -q -T 4 -O /dev/null http://127.0.0.1:52365/api/local_raylet_healthz
