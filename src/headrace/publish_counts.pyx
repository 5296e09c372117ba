"""Counts of publishes. A module of its own, since the AMQP scanner (wire) counts in C what exchanges (broker) own."""


cdef class PublishCounts:
    """What was published to one exchange, and where it went."""

    def add(self, PublishCounts other not None):
        self.published += other.published
        self.routed += other.routed
        self.returned += other.returned
        self.dropped += other.dropped
        self.confirmed += other.confirmed
