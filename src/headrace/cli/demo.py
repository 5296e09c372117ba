"""`headrace demo`: a small shop that generates traffic on a running broker."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import click

from headrace.cli.options import URL_ENV, living_broker, tls_contexts, url_option
from headrace.errors import InvalidInput

SUMMARY_S = 10.0


@click.command()
@click.option("--rate", type=click.FloatRange(0.1, 100_000), default=40.0, show_default=True, help="Orders per second.")
@click.option(
    "--spark/--no-spark", default=True, help="Also run the revenue pipeline, if Java and PySpark are installed."
)
@click.option("--quiet", is_flag=True, help="Print errors only.")
@url_option
def demo(rate: float, spark: bool, quiet: bool, url: str | None, config_file: Path | None) -> int:
    """Generate traffic: a small shop that uses AMQP, Kafka and Spark.

    The shop publishes orders over AMQP, consumes them, rejects a few into a dead-letter queue, reads all of them again
    over Kafka and sums up the revenue in Spark. It runs until Ctrl-C. The queues orders and orders.dead and the topics
    revenue and orders.bad remain afterwards.
    """
    from headrace.client.admin import Client

    say = (lambda line: None) if quiet else (lambda line: click.echo(line))
    found = living_broker(url, config_file)
    with Client(found) as client:
        status = client.get("/status")
    listeners = status["listeners"]
    if not listeners.get("amqp"):
        raise InvalidInput("the demo needs AMQP, but the AMQP listener of this broker is off")
    kafka = _address(listeners["kafka"][0]) if listeners.get("kafka") else None
    pipeline = _start_pipeline(found, status["data_dir"], say) if spark else None
    try:
        asyncio.run(_run(_address(listeners["amqp"][0]), kafka, rate, say, found, status["tls"]))
    finally:
        if pipeline is not None:
            pipeline.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                pipeline.wait(20)
            if pipeline.poll() is None:
                pipeline.kill()
    return 0


async def _run(
    amqp: tuple[str, int], kafka: tuple[str, int] | None, rate: float, say: object, url: str, tls: list[str]
) -> None:
    from headrace.client.exchange import login_of, parse_url
    from headrace.demo.shop import Shop

    assert callable(say)
    shop = Shop(amqp, kafka, rate=rate, say=say, login=login_of(url), tls=tls_contexts(url, tls))
    say(f"{rate:g} orders per second; dashboard: {parse_url(url)}/; stop with Ctrl-C")
    work = asyncio.ensure_future(shop.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    while not work.done():
        await asyncio.wait({work}, timeout=SUMMARY_S)
        done = f"{shop.published:,} published  {shop.worked:,} processed  {shop.died:,} rejected"
        say(f"{done}  {shop.audited:,} read over Kafka")
    if not work.cancelled():
        work.result()


def _start_pipeline(url: str, data_dir: str, say: object) -> "subprocess.Popen[bytes] | None":
    from importlib.util import find_spec

    from headrace.errors import HeadraceError
    from headrace.pipelines.java import check_java

    assert callable(say)
    try:
        check_java()
    except HeadraceError as error:
        say(f"running without Spark: {error}")
        return None
    if find_spec("pyspark") is None:
        say("running without Spark: PySpark is not installed (pip install 'headrace[spark]')")
        return None
    import headrace.demo

    file = Path(headrace.demo.__file__).with_name("revenue.py")
    folder = Path(data_dir).parent / f"{Path(data_dir).name}-demo-checkpoints"
    say("starting Spark for the revenue pipeline; the first batch takes a few seconds")
    command = [sys.executable, "-m", "headrace", "pipeline", "run", str(file)]
    command += ["--checkpoint", str(folder), "--master", "local[2]"]
    command += ["-c", "spark.ui.enabled=false", "-c", "spark.sql.shuffle.partitions=2"]
    # In the environment, because every user of the machine can read arguments, and the URL may contain a password.
    environment, nowhere = {**os.environ, URL_ENV: url}, subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere)


def _address(spelled: str) -> tuple[str, int]:
    host, _, port = spelled.rpartition(":")
    return host.strip("[]"), int(port)
