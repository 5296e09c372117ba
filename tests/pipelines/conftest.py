"""One Spark session for all tests, and a broker for each that asks for one."""

from tests.spark.fixtures import broker, python_of_workers, shared_broker, spark

__all__ = ["broker", "python_of_workers", "shared_broker", "spark"]
