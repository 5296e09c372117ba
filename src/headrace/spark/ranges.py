"""Planning without files or Spark: how far one micro-batch goes. Pure functions over numbers."""

from collections.abc import Mapping

from headrace.spark.offsets import Partition


def spread(behind: Mapping[Partition, int], limit: int) -> dict[Partition, int]:
    """Divide a limit over partitions in proportion to what each has waiting; each that has any gets at least one.

    The sum never passes the limit unless there are more partitions than the limit allows: then the first
    partitions by name get one each, and the others wait for the next batch.
    """
    waiting = {place: size for place, size in sorted(behind.items()) if size > 0}
    total = sum(waiting.values())
    if total <= limit:
        return waiting
    shares = {place: size * limit // total for place, size in waiting.items()}
    rest = limit - sum(shares.values())
    # Whoever was rounded down to nothing comes first, so that a small partition does not starve.
    for place in sorted(waiting, key=lambda p: (shares[p] > 0, -(waiting[p] - shares[p]), p)):
        if rest == 0:
            break
        if shares[place] < waiting[place]:
            shares[place] += 1
            rest -= 1
    return {place: share for place, share in shares.items() if share}
