"""Compression and decompression of batches: gzip, snappy, lz4 and zstd, with limits on the decompressed size.

Used by the batch kernels, and by other packages through `codecs`.
"""
