"""One Spark session for all tests, and a broker for each that asks for one."""

from tests.spark.fixtures import broker, pytest_collection_modifyitems, python_of_workers, shared_broker, spark

__all__ = ["broker", "pytest_collection_modifyitems", "python_of_workers", "shared_broker", "spark"]
