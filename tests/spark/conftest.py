"""Fixtures: one Spark session for all tests, and brokers."""

from tests.spark.fixtures import broker, pytest_collection_modifyitems, python_of_workers, shared_broker, spark

__all__ = ["broker", "pytest_collection_modifyitems", "python_of_workers", "shared_broker", "spark"]
