from headrace.doors.kafka.connection import Request
from headrace.doors.kafka.door import KafkaDoor

def produce(door: KafkaDoor, request: Request) -> None: ...
