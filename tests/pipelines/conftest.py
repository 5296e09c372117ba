"""One Spark session for all tests, and a broker for each that asks for one."""

from tests.spark.fixtures import broker, shared_broker, spark

__all__ = ["broker", "shared_broker", "spark"]
