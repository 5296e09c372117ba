"""Registers format("headrace") with PySpark, which imports all modules called pyspark_*."""

from headrace.spark.source import HeadraceSource


class DefaultSource(HeadraceSource):
    """The class name that PySpark looks for."""


__all__ = ["DefaultSource"]
