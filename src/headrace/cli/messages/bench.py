"""`headrace bench`: measure how fast messages pass through a broker."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import json_option, living_broker, tls_contexts, url_option
from headrace.errors import HeadraceError, InvalidInput

if TYPE_CHECKING:
    import ssl

QUEUE = "headrace-bench"
PATIENCE_S = 120.0
REMOVE_S = 10.0


@click.command()
@click.option("-n", "--messages", type=click.IntRange(1), default=20_000, show_default=True, help="Number of messages.")
@click.option(
    "-s", "--size", type=click.IntRange(0, 1 << 20), default=1000, show_default=True, help="Bytes per message."
)
@click.option(
    "-w",
    "--window",
    type=click.IntRange(1),
    default=500,
    show_default=True,
    help="Maximum number of unconfirmed messages.",
)
@json_option
@url_option
def bench(messages: int, size: int, window: int, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Measure the throughput of publishing with confirms and of consuming with acks, over AMQP.

    The client is pure Python and slower than the broker, so the figures are a lower bound: use them to compare disks
    and settings. The queue headrace-bench is created for the run and deleted at the end, also after Ctrl-C.
    """
    from headrace.cli.output import show_facts, show_json
    from headrace.client.admin import Client
    from headrace.client.exchange import login_of

    found = living_broker(url, config_file)
    with Client(found) as client:
        status = client.get("/status")
    listeners = status["listeners"]
    if not listeners.get("amqp"):
        raise InvalidInput("bench needs AMQP, but the AMQP listener of this broker is off")
    host, _, port = listeners["amqp"][0].rpartition(":")
    tls = tls_contexts(found, status["tls"]).get("amqp")
    result = asyncio.run(_run(host.strip("[]"), int(port), login_of(found), tls, messages, size, window))
    show_json(result) if as_json else show_facts(result)


async def _run(
    host: str,
    port: int,
    login: tuple[str, str] | None,
    tls: "ssl.SSLContext | None",
    messages: int,
    size: int,
    window: int,
) -> dict[str, Any]:
    from pamqp import commands

    from headrace.demo.amqp import AmqpClient

    client = await AmqpClient.connect(host, port, "headrace bench", login, tls)
    try:
        await client.call(commands.Queue.Declare, queue=QUEUE, durable=True)
        await client.call(commands.Queue.Purge, queue=QUEUE)
        await client.call(commands.Confirm.Select)
        body = b"x" * size
        began = time.monotonic()
        for _ in range(messages):
            await client.publish("", QUEUE, body, {})
            await client.wait_for_confirms(window)
        await client.wait_for_confirms(0)
        published_s = time.monotonic() - began
        await client.call(commands.Basic.Qos, prefetch_count=1000)
        began = time.monotonic()
        await client.call(commands.Basic.Consume, queue=QUEUE)
        for _ in range(messages):
            delivery = await asyncio.wait_for(client.deliveries.get(), PATIENCE_S)
            client.ack(delivery.tag)
        consumed_s = time.monotonic() - began
    finally:
        with contextlib.suppress(HeadraceError, TimeoutError):  # the connection may be lost
            await asyncio.wait_for(client.call(commands.Queue.Delete, queue=QUEUE), REMOVE_S)
        await client.close()
    return {
        "messages": messages,
        "size_bytes": size,
        "window": window,
        "publish_seconds": round(published_s, 3),
        "publish_per_second": round(messages / published_s),
        "consume_seconds": round(consumed_s, 3),
        "consume_per_second": round(messages / consumed_s),
    }
