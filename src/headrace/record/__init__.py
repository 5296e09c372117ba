"""Record batches in Kafka's RecordBatch v2 format: building, scanning, decoding, filtering and compression.

The lowest layer: every package may use it, and it uses only `errors`. Import the batch functions from `codec`, the
values from `types` and the constants from `layout`.
"""
