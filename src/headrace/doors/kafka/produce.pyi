from headrace.doors.kafka.door import KafkaDoor
from headrace.doors.kafka.pipe import Request

def produce(door: KafkaDoor, request: Request) -> None: ...
