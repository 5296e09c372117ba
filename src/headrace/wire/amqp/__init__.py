"""AMQP 0-9-1: frames and methods, the scanner of received bytes, delivery tags and the encoder of deliveries.

Used by the AMQP listener and the demo. There is one exception to "a codec calls nothing": the scanner appends publishes
to the open batches of the broker's queues, through the protocol `Owner` in scan.pyi. Going through the listener would
cost a Python call per message.
"""
