"""Clients that connect from another address than loopback, beside a broker in a network namespace of their own.

Run as a program by test_protected_mode.py under `unshare --net`: the namespace has only a loopback interface, which
gets one more address. Prints one JSON object with the outcome of each client.
"""

import base64
import fcntl
import json
import socket
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pika
import pika.exceptions
from confluent_kafka import KafkaException, Message, Producer

from tests.broker_process import BrokerProcess

REMOTE = "192.0.2.1"  # of a range reserved for documentation; local to the namespace
SIOCSIFADDR, SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x8913, 0x8914, 1


def add_address(interface: str, address: str) -> None:
    name = interface.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFADDR, struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address)))
        request = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sH14x", name, 0))
        flags = struct.unpack("16sH14x", request)[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", name, flags | IFF_UP))


def over_amqp(host: str, port: int) -> str:
    parameters = pika.ConnectionParameters(host, port, socket_timeout=10, connection_attempts=1)
    try:
        with pika.BlockingConnection(parameters) as connection:
            connection.channel().queue_declare(f"from-{host}", durable=True)
    except pika.exceptions.AMQPConnectionError as error:
        return type(error).__name__
    return "served"


def over_kafka(host: str, port: int) -> str:
    outcome: list[str] = []

    def delivered(error: object, _: Message) -> None:
        outcome.append("refused" if error else "served")

    settings: dict[str, str | int] = {
        "bootstrap.servers": f"{host}:{port}",
        "message.timeout.ms": 5_000,
        "log_level": 0,
    }
    producer = Producer(settings)
    try:
        producer.produce("orders", b"1", on_delivery=delivered)
    except KafkaException:
        return "refused"
    producer.flush(20)
    return outcome[0] if outcome else "no answer"


def over_http(host: str, port: int, path: str, *, body: bytes | None = None, login: str | None = None) -> str:
    request = urllib.request.Request(f"http://{host}:{port}{path}", data=body)
    if body is not None:
        request.add_header("content-type", "text/plain")
    if login is not None:
        request.add_header("authorization", "Basic " + base64.b64encode(login.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(response.status)
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"


def outcomes(folder: Path, *options: str) -> dict[str, str]:
    add_address("lo", "127.0.0.1")
    add_address("lo:1", REMOTE)
    broker = BrokerProcess(folder, *options, listeners=("amqp", "kafka", "http"), host="0.0.0.0")
    try:
        ports = broker.start().ports
        clients: dict[str, Callable[[str], str]] = {
            "amqp": lambda host: over_amqp(host, ports["amqp"]),
            "kafka": lambda host: over_kafka(host, ports["kafka"]),
            "http": lambda host: over_http(host, ports["http"], "/topics/orders/messages", body=b"1"),
            "management": lambda host: over_http(host, ports["http"], "/api/queues", login="guest:guest"),
            "health": lambda host: over_http(host, ports["http"], "/health"),
        }
        found = {name: client(REMOTE) for name, client in clients.items()}
        found |= {f"local {name}": client("127.0.0.1") for name, client in clients.items()}
        return {**found, "said": broker.said()}
    finally:
        broker.close()


if __name__ == "__main__":
    print(json.dumps(outcomes(Path(sys.argv[1]), *sys.argv[2:])))
