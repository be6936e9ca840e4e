#!/bin/sh
# Starts one command of streamrl. Metrics listen on the container's own name, which the other containers can resolve, and
# which the note that the process leaves for Prometheus then holds.
set -eu
: "${STREAMRL_METRICS__HOST:=${HOSTNAME:-127.0.0.1}}"
export STREAMRL_METRICS__HOST
# A run without a name is called after its task, so that another task never goes on from this one's checkpoints. Of a
# directory that is its name, and a part of its path's checksum, since two may have the same name; a volume has its own.
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
