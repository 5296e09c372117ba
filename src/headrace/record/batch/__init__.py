"""Cython kernels over record batches: build, scan and validate, decode, filter, compact, recompress, checksums.

Python code imports most of them through `record.codec`, the wire and log kernels by cimport; they may use `record.amqp`
and `record.compression`.
"""
