"""Periodic and requested maintenance: retention, compaction, reclaiming settled messages, expired links.

`Broker` schedules it, listeners request it. It uses streams, queues, vhosts and log/.
"""
