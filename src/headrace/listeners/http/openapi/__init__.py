"""The OpenAPI document of the native API. Schemas are generated from the types of `native/`; paths are written here.

Served by `document.py`; nothing else uses this package.
"""
