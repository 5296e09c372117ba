"""What a Python process does once, when Spark first gives it a task of ours."""

import gc

from headrace.allocator import keep_freed_memory

_is_prepared = False


def prepare_worker() -> None:
    """Take what is loaded by now out of the garbage collector's sight, and keep the memory of one batch for the next.

    Spark collects garbage after every task, and each time that walks over all objects of Spark, Arrow and our own
    modules, none of which ever goes: of a task over 64 MB it was two fifths of the Python time. Once per process, so
    that what later tasks leave behind is still collected.
    """
    global _is_prepared
    if not _is_prepared:
        _is_prepared = True
        gc.freeze()
        keep_freed_memory()
