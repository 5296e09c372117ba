"""An HTTP proxy between Spark and a broker that breaks connections on request, so that real responses get lost."""

import contextlib
import socket
import threading
from types import TracebackType

MARKS = {
    "stage": b"PUT /staging/",
    "commit": b"PUT /sinks/",
    "discard": b"DELETE /staging/",
    "lease": b"POST /leases ",
    "create": b"POST /topics ",
}
REFUSAL = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"


class Proxy:
    """`break_next("commit:after")`: the next commit reaches the broker, but its response is lost.

    before: the connection breaks before the broker receives the request; after: after its response;
    refuse, refuse-after: the same, but Spark receives an error, so that the batch fails and is aborted.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._faults: list[str] = []
        self.broken: list[str] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def break_next(self, *faults: str) -> None:
        """Plans breaks: each applies to the next request of its kind, one after the other."""
        with self._lock:
            self._faults = list(faults)

    def _take(self, head: bytes) -> str | None:
        with self._lock:
            if not self._faults or not head.startswith(MARKS[self._faults[0].partition(":")[0]]):
                return None
            fault = self._faults.pop(0)
            self.broken.append(fault)
            return fault.partition(":")[2]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as broker, contextlib.suppress(OSError):
            while True:
                request = _message(client)
                if request is None:
                    return
                how = self._take(request)
                if how == "before":
                    return
                if how == "refuse":
                    client.sendall(REFUSAL)
                    continue
                broker.sendall(request)
                answer = _message(broker)
                if answer is None or how == "after":
                    return
                client.sendall(REFUSAL if how == "refuse-after" else answer)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()


def _message(source: socket.socket) -> bytes | None:
    """Reads one HTTP message with a content length; None at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = source.recv(65536)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    parts = [head + b"\r\n\r\n", body]
    missing = length - len(body)
    while missing > 0:
        piece = source.recv(min(missing, 1 << 20))
        if not piece:
            return None
        parts.append(piece)
        missing -= len(piece)
    return b"".join(parts)
