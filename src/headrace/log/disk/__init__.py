"""Files, threads and names on disk: the Disk interface, I/O chains, open files, workers and paths.

All of log/ uses this package, which uses nothing else of log/ (file_cache.py is the exception: it serves archived
segments). See disk.py for the modules that may call the operating system.
"""
