from headrace.listeners.kafka.listener import KafkaDoor
from headrace.listeners.kafka.request_pipeline import Request

def produce(door: KafkaDoor, request: Request) -> None: ...
