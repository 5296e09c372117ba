"""What the index of keys costs, and how fast it answers: `make bench ONLY=keys`.

A million records of 100 B with a million different keys are produced with librdkafka to a topic with `key_index` and
to one without. Then: how long the index takes to be at the end, what the broker spent more, how much memory it holds,
look-ups over HTTP of keys that are there and of keys that are not, and the same of the store alone.
"""

import argparse
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from confluent_kafka import Producer

from bench import machine
from bench.broker import Broker
from headrace.broker.streams.key_index_rocksdb import KeyStore

BODY = b"x" * 100
LOOKUPS = 4_000
STORE_LOOKUPS = 200_000
CLIENTS = 4


def produce(broker: Broker, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": broker.addresses["kafka"], "linger.ms": 20})
    for number in range(count):
        while True:
            try:
                producer.produce(topic, BODY, key=b"customer-%09d" % number)
                break
            except BufferError:
                producer.poll(0.05)
    assert producer.flush(120) == 0


def run(count: int) -> None:
    print(f"machine    {machine.describe()}\nrecords    {count:,} of {len(BODY)} B, each with a key of its own")
    with (
        tempfile.TemporaryDirectory(prefix="bench-keys-") as folder,
        Broker(folder) as broker,
        httpx.Client(base_url=broker.url, timeout=60) as http,
    ):
        spent = {}
        for topic in ("plain", "indexed"):
            config = {"key_index": str(topic == "indexed").lower()}
            http.post("/topics", json={"name": topic, "config": config}).raise_for_status()
            cpu_s, began = broker.cpu_s, time.monotonic()
            produce(broker, topic, count)
            produced_s = time.monotonic() - began
            while topic == "indexed" and http.get(f"/topics/{topic}/keys/nobody").status_code == 503:
                pass
            behind_s = time.monotonic() - began - produced_s
            time.sleep(1.0)
            spent[topic] = (broker.cpu_s - cpu_s) * 1e6 / count
            said = f"produced in {produced_s:.1f} s, {spent[topic]:.3f} CPU-s/M"
            print(f"{topic:<10} {said}" + (f"; the index {behind_s:.2f} s later" if topic == "indexed" else ""))
        print(f"index      {spent['indexed'] - spent['plain']:.3f} CPU-s/M, broker {broker.rss_bytes >> 20} MB")
        for what, keys in (
            ("there", [f"customer-{random.randrange(count):09d}" for _ in range(LOOKUPS)]),
            ("missing", [f"stranger-{number}" for number in range(LOOKUPS)]),
        ):
            with ThreadPoolExecutor(CLIENTS) as clients:
                cpu_s, began = broker.cpu_s, time.monotonic()
                list(clients.map(lambda key: http.get(f"/topics/indexed/keys/{key}").status_code, keys))
                seconds = time.monotonic() - began
            each_us = (broker.cpu_s - cpu_s) * 1e6 / LOOKUPS
            print(f"over HTTP  {what}: {LOOKUPS / seconds:,.0f}/s, {each_us:.0f} CPU-us each")
    store_alone(count)


def store_alone(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-keys-") as folder:
        store = KeyStore(folder)
        entries = [(b"customer-%09d" % number, number) for number in range(count)]
        began, cpu_s = time.monotonic(), time.process_time()
        store.put(1, entries, count)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
        print(f"store      written: {count / seconds:,.0f}/s, {cpu_s * 1e6 / count:.3f} CPU-s/M")
        for what, keys in (
            ("there", [b"customer-%09d" % random.randrange(count) for _ in range(STORE_LOOKUPS)]),
            ("missing", [b"stranger-%d" % number for number in range(STORE_LOOKUPS)]),
        ):
            began = time.monotonic()
            found = sum(store.find(1, key) is not None for key in keys)
            assert found == (STORE_LOOKUPS if what == "there" else 0)
            print(f"store      {what}: {STORE_LOOKUPS / (time.monotonic() - began):,.0f}/s on one thread")
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.keys", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, metavar="N", help="default: %(default)s")
    run(parser.parse_args().records)


if __name__ == "__main__":
    main()
