#!/bin/sh
# A worker in one line of shell, with nothing but the nats CLI. An acknowledged run has succeeded, so this one runs each
# command at most once: NATS_URL=nats://127.0.0.1:4222 examples/shell-worker.sh data-sync-default-t60r3
while :; do nats consumer next AX_TRIGGERS "$1" --ack --raw --timeout 20s 2>/dev/null | while read -r run; do echo "done: $run"; done; done
