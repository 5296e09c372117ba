"""Headrace: a durable, log-structured message broker.

This module exports the public Python API: clients, the embedded log and the base error. Each name is imported on first
use, so that `import headrace` is cheap.
"""

from typing import TYPE_CHECKING

from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.client.admin import Client
    from headrace.client.async_consumer import AsyncConsumer
    from headrace.client.async_producer import AsyncProducer
    from headrace.client.consumer import Consumer
    from headrace.client.producer import Producer
    from headrace.client.shapes import Message, Published
    from headrace.embedded import Log, Subscription
    from headrace.errors import HeadraceError
    from headrace.record.types import Record

_MODULES = {
    "AsyncConsumer": "headrace.client.async_consumer",
    "AsyncProducer": "headrace.client.async_producer",
    "Client": "headrace.client.admin",
    "Consumer": "headrace.client.consumer",
    "HeadraceError": "headrace.errors",
    "Log": "headrace.embedded",
    "Message": "headrace.client.shapes",
    "Producer": "headrace.client.producer",
    "Published": "headrace.client.shapes",
    "Record": "headrace.record.types",
    "Subscription": "headrace.embedded",
}

__all__ = [
    "AsyncConsumer",
    "AsyncProducer",
    "Client",
    "Consumer",
    "HeadraceError",
    "Log",
    "Message",
    "Producer",
    "Published",
    "Record",
    "Subscription",
    "__version__",
]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
