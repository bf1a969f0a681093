#!/bin/sh
# A worker in one line of shell, with nothing but the nats CLI. It acknowledges before it executes, and an acknowledged run
# has succeeded: so each run is executed at most once. NATS_URL=nats://127.0.0.1:4222 examples/shell-worker.sh CONSUMER
while :; do { nats consumer next AX_TRIGGERS "${1:?name a consumer, see nats consumer ls AX_TRIGGERS}" --ack --raw --timeout 20s || sleep 1; } | while read -r run; do [ -z "$run" ] || echo "done: $run"; done; done
