"""The catalog: small documents that say what exists (streams, exchanges, queues, users, policies).

Components of the broker depend on this protocol; file_catalog.py is its implementation.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.errors import CorruptCatalog
from headrace.log.catalog.document import Identity, file_name
from headrace.log.disk.paths import CATALOG

__all__ = ["Catalog", "Identity", "file_name", "shaped"]

T = TypeVar("T")


class Catalog(Protocol):
    """All methods block and may be called from any thread; code on the event loop calls them in a thread."""

    def load(self, kind: str) -> Iterator[dict[str, Any]]:
        """Every document of a kind."""

    def put(self, kind: str, identity: Identity, document: dict[str, Any]) -> None:
        """Create or replace a document, durably on return. After an error either version may be stored."""

    def put_all(self, kind: str, contents: Mapping[Identity, dict[str, Any]]) -> None:
        """Like `put` for many documents of one kind, with few syncs. After an error or a crash any of them may be
        stored."""

    def remove(self, kind: str, identity: Identity) -> None:
        """Delete a document, durably on return. A document that does not exist is not an error."""


def shaped(kind: str, document: dict[str, Any], shape: type[T]) -> T:
    """Convert a document to its type. CorruptCatalog if it does not fit: it may have been edited by hand."""
    try:
        return msgspec.convert(document, shape)
    except msgspec.ValidationError as error:
        path = f"{CATALOG}/{kind}/{file_name(tuple(document['identity']))}"
        raise CorruptCatalog(path, f"{error}; `headrace log repair --without FILE` goes on without it") from None
