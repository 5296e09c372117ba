"""`headrace demo`: keep a running broker busy with a small shop, so that there is something to see."""

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
@click.option("--rate", type=click.FloatRange(0.1, 100_000), default=40.0, show_default=True, help="Orders a second.")
@click.option("--spark/--no-spark", default=True, help="Run the revenue pipeline too, if Java and PySpark are there.")
@click.option("--quiet", is_flag=True, help="Say nothing but what goes wrong.")
@url_option
def demo(rate: float, spark: bool, quiet: bool, url: str | None, config_file: Path | None) -> int:
    """Publish orders over AMQP, work on them, let a few die, read all again over Kafka, sum them up in Spark.

    Runs until Ctrl-C. What it made stays: the queues orders and orders.dead, the topics revenue and orders.bad.
    """
    from headrace.client.admin import Client

    say = (lambda line: None) if quiet else (lambda line: click.echo(line))
    found = living_broker(url, config_file)
    with Client(found) as client:
        status = client.get("/status")
    listeners = status["listeners"]
    if not listeners.get("amqp"):
        raise InvalidInput("the demo speaks AMQP, and this broker's AMQP listener is off")
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
    say(f"{rate:g} orders a second; the dashboard is {parse_url(url)}/  Ctrl-C stops the demo")
    work = asyncio.ensure_future(shop.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    while not work.done():
        await asyncio.wait({work}, timeout=SUMMARY_S)
        done = f"{shop.published:,} published  {shop.worked:,} worked  {shop.died:,} died"
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
        say(f"without Spark: {error}")
        return None
    if find_spec("pyspark") is None:
        say("without Spark: PySpark is not installed (pip install 'headrace[spark]')")
        return None
    import headrace.demo

    file = Path(headrace.demo.__file__).with_name("revenue.py")
    folder = Path(data_dir).parent / f"{Path(data_dir).name}-demo-checkpoints"
    say("starting Spark for the revenue pipeline; its first batch takes some seconds")
    command = [sys.executable, "-m", "headrace", "pipeline", "run", str(file)]
    command += ["--checkpoint", str(folder), "--master", "local[2]"]
    command += ["-c", "spark.ui.enabled=false", "-c", "spark.sql.shuffle.partitions=2"]
    # Not among the arguments, which everybody on the machine may look at: there may be a password in it.
    environment, nowhere = {**os.environ, URL_ENV: url}, subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere)


def _address(spelled: str) -> tuple[str, int]:
    host, _, port = spelled.rpartition(":")
    return host.strip("[]"), int(port)
