"""The files of the catalog: checksummed JSON documents, their second copy, and repair after damage.

The broker's catalog and the repair command use it; broker/catalog decides what the documents say. It may use `disk` and
`standby`.
"""
