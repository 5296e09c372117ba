"""Pipelines on Spark: plain PySpark functions with a small declaration, and the upkeep of logs as jobs.

from headrace.pipelines import Pipeline, Sink, Source
"""

from headrace.pipelines.declare import Pipeline, Sink, Source

__all__ = ["Pipeline", "Sink", "Source"]
