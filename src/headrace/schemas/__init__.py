"""The schema registry without I/O: Avro, JSON Schema and Protobuf, their compatibility rules, and the registered state.

Used by `broker.schemas` and the HTTP listener; uses only `errors`. Nothing here is imported before the first schema is
registered or looked up. Google's protobuf runtime could not replace the linker: it accepts reserved field numbers and
overlapping ranges, and its errors name no line.
"""
