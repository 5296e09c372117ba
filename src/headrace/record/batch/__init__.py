"""The kernels for record batches, in Cython: they check every length against an end pointer and run without the GIL
where they can. Other packages use them through `record.codec`; `wire` and `log` also cimport them.
"""
