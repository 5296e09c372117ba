"""Pipelines on Spark, and maintenance jobs for logs.

A pipeline is a Python file with PySpark functions and a declaration: `from headrace.pipelines import Pipeline, Sink,
Source`. The command line and the demo use this package; it uses headrace.spark for the data source and headrace.log
for the maintenance of segments.
"""

from headrace.pipelines.declare import Pipeline, Sink, Source

__all__ = ["Pipeline", "Sink", "Source"]
