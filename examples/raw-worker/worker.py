"""A complete ax worker with nothing but nats-py:  NATS_URL=nats://127.0.0.1:4222 python worker.py GROUP"""
import asyncio, json, os, sys
import nats
from nats.errors import TimeoutError

async def handle(run):  # your code; an exception = failed. It may see a run twice: run_id is the key.
    print(run["trigger_time"], run["handler"], run["run_id"], run["payload"], flush=True)

async def pull(js, consumer):
    messages = await js.pull_subscribe_bind(consumer, "AX_TRIGGERS")
    while True:
        try:
            [message] = await messages.fetch(1, timeout=5)
        except TimeoutError:
            continue
        try:
            await handle(json.loads(message.data))
            await message.ack()
        except Exception as error:
            print(repr(error), file=sys.stderr, flush=True)
            await message.nak(delay=5)

async def main(group):
    nc = await nats.connect(os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), max_reconnect_attempts=-1)
    js, pulls = nc.jetstream(), {}
    groups = await js.key_value("ax_groups")
    changes = await groups.watch(group)
    while True:  # a changed timeout moves a task to another consumer: follow the list, and re-read it every 30 s
        try:
            for name in [c["name"] for c in json.loads((await groups.get(group)).value)["consumers"]]:
                if name not in pulls or pulls[name].done():
                    pulls[name] = asyncio.create_task(pull(js, name))
        except nats.errors.Error as error:
            print(f"group {group}: {error!r} (has it a task?)", file=sys.stderr, flush=True)
        try:
            await changes.updates(timeout=30)
        except TimeoutError:
            pass

if len(sys.argv) != 2:
    sys.exit(__doc__)
asyncio.run(main(sys.argv[1]))
