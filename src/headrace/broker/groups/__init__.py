"""Groups of consumers that share the partitions of topics, and the offsets they commit."""
