"""The Spark data source and sink `format("headrace")`, in Python and without a jar.

source.py is the entry point. Reading: options, planning on the driver (plan.py), an Access to the records (files of a
data folder, or a broker), and decoding on executors (rows.py). Writing: writer.py. Pipelines build on this package; of
headrace.log it may only use the modules for reading files from another process.
"""
