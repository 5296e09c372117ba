"""Pipelines on Spark: plain PySpark functions with a small declaration, and the upkeep of logs as jobs."""
