"""Compression codecs of record batches, with limits on the size and memory of decompressed data.

Used by the batch and Arrow kernels, by the HTTP wire format and by the command line; may use only `headrace.errors` and
the batch layout.
"""
