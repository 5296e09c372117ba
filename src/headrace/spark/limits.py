"""Divides the limit of a micro-batch over its partitions. Pure functions, without files or Spark."""

from collections.abc import Mapping

from headrace.spark.offsets import Partition


def divide_limit(backlog: Mapping[Partition, int], limit: int) -> dict[Partition, int]:
    """Divides `limit` over the partitions in proportion to their backlog; each with a backlog gets at least one.

    The sum never exceeds the limit. If there are more partitions than the limit allows, those with the largest backlog
    get one each; the backlog of the others grows, so that a later batch includes them.
    """
    waiting = {partition: size for partition, size in sorted(backlog.items()) if size > 0}
    if sum(waiting.values()) <= limit:
        return waiting
    if len(waiting) >= limit:
        return dict.fromkeys(sorted(waiting, key=lambda partition: (-waiting[partition], partition))[:limit], 1)
    # One for each, so that a small partition does not starve; then the rest in proportion to the remaining backlog.
    left = {partition: size - 1 for partition, size in waiting.items()}
    total, room = sum(left.values()), limit - len(waiting)
    shares = {partition: 1 + size * room // total for partition, size in left.items()}
    rest = limit - sum(shares.values())
    for partition in sorted(waiting, key=lambda p: (shares[p] - waiting[p], p)):
        if rest == 0:
            break
        shares[partition] += 1
        rest -= 1
    return shares
