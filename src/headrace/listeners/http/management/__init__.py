"""RabbitMQ's management API, as far as its tools use it: rabbitmqadmin, Flower, exporters, scripts of many years."""
