"""Found by PySpark by its name: makes format("headrace") work without registering anything."""

from headrace.spark.source import HeadraceSource


class DefaultSource(HeadraceSource):
    """PySpark looks for a class of this name in every importable module called pyspark_*."""


__all__ = ["DefaultSource"]
