"""The topic that holds all schemas, as in Confluent's registry."""

TOPIC = "_schemas"
