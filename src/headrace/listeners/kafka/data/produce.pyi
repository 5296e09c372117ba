from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.request_pipeline import Request

def produce(listener: KafkaContext, request: Request) -> None: ...
