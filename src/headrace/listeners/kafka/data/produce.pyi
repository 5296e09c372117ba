from headrace.listeners.kafka.listener import KafkaListener
from headrace.listeners.kafka.request_pipeline import Request

def produce(listener: KafkaListener, request: Request) -> None: ...
