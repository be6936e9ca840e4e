#!/bin/sh
# Starts one role. Metrics listen on the container's own name, which the other containers can resolve, and which the
# note that the process leaves for Prometheus then holds.
set -eu
: "${STREAMRL_METRICS__HOST:=${HOSTNAME:-127.0.0.1}}"
export STREAMRL_METRICS__HOST
exec streamrl "$@"
