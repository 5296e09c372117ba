"""The AMQP 0-9-1 listener, compatible with RabbitMQ's clients, extensions and error texts.

listener.py accepts sockets; a connection has a transport, a dispatcher, channels and publisher confirms; `methods` has
the handlers. Only the server starts it. It uses `wire.amqp` for bytes and the broker's vhosts for everything else.
"""
