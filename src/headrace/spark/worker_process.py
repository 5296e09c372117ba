"""One-time tuning of a Python worker process that runs Spark tasks."""

import gc

from headrace.allocator import keep_freed_memory

_is_prepared = False


def prepare_worker() -> None:
    """Exempts loaded modules from garbage collection, and makes malloc reuse the memory of one batch for the next.

    Spark runs a full collection after every task, which visits all objects of Spark, Arrow and Headrace although they
    never become garbage: two fifths of the Python time of a task over 64 MB. This runs once per process, so that
    garbage of later tasks is still collected.
    """
    global _is_prepared
    if not _is_prepared:
        _is_prepared = True
        gc.freeze()
        keep_freed_memory()
