"""A server that misbehaves as told: what a healthy broker never does, a network does every day."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CLOSE = b""  # read the request, then hang up


def ok(body: bytes, *, headers: str = "", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


class Scripted:
    """Answers the nth request with the nth line of its script; an answer ending in CLOSE_AFTER closes."""

    def __init__(self, script: Sequence[bytes]) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._script = list(script)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._script:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(60)
        while self._script:
            request = _read_request(connection)
            if request is None:
                return
            self.requests.append(request)
            answer = self._script.pop(0)
            if answer == CLOSE:
                return
            connection.sendall(answer)
            if b"Then: close" in answer:
                return

    def close(self) -> None:
        self._script.clear()
        # shutdown() and not only close(): a thread in accept() would otherwise sleep on.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def _read_request(connection: socket.socket) -> bytes | None:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")), 0)
    while len(body) < length:
        piece = connection.recv(65536)
        if not piece:
            return None
        body += piece
    return head + b"\r\n\r\n" + body


@contextmanager
def scripted(*script: bytes) -> Iterator[Scripted]:
    server = Scripted(script)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def refusing(answer: bytes) -> Iterator[str]:
    """The address of a server that replies after the request head and closes the connection during the body."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(1000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()
