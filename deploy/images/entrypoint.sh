#!/bin/sh
# Starts one streamrl command. The metrics endpoint listens on the container's name, which other containers can resolve.
# The process notes this address in a file for Prometheus.
set -eu
: "${STREAMRL_METRICS__HOST:=${HOSTNAME:-127.0.0.1}}"
export STREAMRL_METRICS__HOST
# A run without a name is named after its task, so that another task never continues from this one's checkpoints. For a
# directory the name has a part of its path's checksum, because two directories may have the same name. A volume's name
# is unique.
case "${STREAMRL_RUN__NAME:-}${TASK_PATH:-}" in
  */*)
    if [ -z "${STREAMRL_RUN__NAME:-}" ]; then
      plain=$(basename "$TASK_PATH" | tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' '-' | cut -c 1-40 | sed 's/^-*//; s/-*$//')
      STREAMRL_RUN__NAME="${plain:-task}-$(printf '%s' "$TASK_PATH" | sha256sum | cut -c 1-6)"
    fi
    ;;
  *) STREAMRL_RUN__NAME=${STREAMRL_RUN__NAME:-${TASK_PATH:-}} ;;
esac
if [ -n "$STREAMRL_RUN__NAME" ]; then
  export STREAMRL_RUN__NAME
else
  unset STREAMRL_RUN__NAME
fi
exec streamrl "$@"
