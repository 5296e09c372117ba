"""Planning without files or Spark: how far one micro-batch goes. Pure functions over numbers."""

from collections.abc import Mapping

from headrace.spark.offsets import Partition


def spread(behind: Mapping[Partition, int], limit: int) -> dict[Partition, int]:
    """Divide a limit over partitions in proportion to what each has waiting; each that has any gets at least one.

    The sum never passes the limit. Where there are more partitions than the limit allows, those with the most waiting
    get one each; the others wait for the next batch, and have more waiting then.
    """
    waiting = {place: size for place, size in sorted(behind.items()) if size > 0}
    if sum(waiting.values()) <= limit:
        return waiting
    if len(waiting) >= limit:
        return dict.fromkeys(sorted(waiting, key=lambda place: (-waiting[place], place))[:limit], 1)
    # One for each, so that a small partition does not starve; the rest in proportion to what is left.
    left = {place: size - 1 for place, size in waiting.items()}
    total, room = sum(left.values()), limit - len(waiting)
    shares = {place: 1 + size * room // total for place, size in left.items()}
    rest = limit - sum(shares.values())
    for place in sorted(waiting, key=lambda p: (shares[p] - waiting[p], p)):
        if rest == 0:
            break
        shares[place] += 1
        rest -= 1
    return shares
