"""A package index on 127.0.0.1 (PEP 503) whose file downloads can be made to misbehave."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Request:
    """One request for a file, and how many bytes of the body were sent."""

    path: str
    range: str | None
    encoding: str | None
    sent: int = 0


@dataclass
class SimpleIndex:
    """The files of one index and the faults of its next downloads.

    ``faults`` are used one per file request, in order: a function that changes the reply.
    """

    files: dict[str, bytes]
    project: str = "vllm"
    hashes: bool = True
    url: str = ""
    faults: list[Callable[[Reply], None]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    credentials: set[str | None] = field(default_factory=set)

    def page(self) -> bytes:
        """The project page: one anchor a file."""
        anchors = "".join(
            f'<a href="/files/{name}{self._fragment(data)}">{name}</a>\n'
            for name, data in self.files.items()
        )
        return f"<!DOCTYPE html><html><body>{anchors}</body></html>".encode()

    def _fragment(self, data: bytes) -> str:
        return f"#sha256={hashlib.sha256(data).hexdigest()}" if self.hashes else ""


@dataclass
class Reply:
    """What the server is about to answer; faults change it."""

    status: int
    headers: dict[str, str]
    body: bytes
    cut: int | None = None
    on_sent: Callable[[int], None] | None = None


@contextmanager
def serve(index: SimpleIndex) -> Iterator[SimpleIndex]:
    """Serve ``index`` until the block ends; ``index.url`` is its simple root."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            index.credentials.add(self.headers.get("Authorization"))
            if self.path == f"/simple/{index.project}/":
                self._send(Reply(200, {"Content-Type": "text/html"}, index.page()))
            elif (name := self.path.removeprefix("/files/")) in index.files:
                self._send_file(index.files[name])
            else:
                self._send(Reply(404, {}, b"no such page"))

        def _send_file(self, data: bytes) -> None:
            headers = self.headers
            request = Request(self.path, headers.get("Range"), headers.get("Accept-Encoding"))
            index.requests.append(request)
            reply = Reply(200, {}, data)
            if request.range is not None:
                start = int(request.range.removeprefix("bytes=").removesuffix("-"))
                if start >= len(data):
                    reply = Reply(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
                else:
                    extent = f"bytes {start}-{len(data) - 1}/{len(data)}"
                    reply = Reply(206, {"Content-Range": extent}, data[start:])
            if index.faults:
                index.faults.pop(0)(reply)
            self._send(reply, request)

        def _send(self, reply: Reply, request: Request | None = None) -> None:
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if "Transfer-Encoding" not in reply.headers:
                self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            body = reply.body if reply.cut is None else reply.body[: reply.cut]
            for at in range(0, len(body), 4096):
                self.wfile.write(body[at : at + 4096])
                if request is not None:
                    request.sent += len(body[at : at + 4096])
                if reply.on_sent is not None:
                    reply.on_sent(at + 4096)
            if reply.cut is not None:
                self.close_connection = True
                self.wfile.flush()
                self.connection.close()

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: object) -> None:
            """A client that went away is part of the tests."""

    with Server(("127.0.0.1", 0), Handler) as server:
        host, port = server.server_address[:2]
        index.url = f"http://{host!s}:{port}/simple/"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()
