"""Conversion between record batches and columns in Arrow's memory layout, without depending on pyarrow.

Used by the Spark source and sink, the tier and `record.codec`; may use `record.batch` and `record.compression`.
"""
