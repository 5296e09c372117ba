"""Conversion between record batches and Arrow columns, in both directions.

Used by Spark, by archiving to Parquet and by reading from the archive. Does not import pyarrow: it fills buffers.
"""
