"""Headrace as a Spark data source and sink, in Python, without a jar: `format("headrace")`."""
