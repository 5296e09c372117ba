"""Recovery of a data folder when a shard opens, inspection from outside, and repair of a damaged journal.

Used by the shard and by offline commands. May use everything in log/ except catalog, standby and the shard.
"""
