"""A chat endpoint of twenty lines, and a socket that answers with whatever bytes it is told to."""

import contextlib
import http.server
import json
import socket
import struct
import threading
import time
import types

from rljax.rewards.judges import endpoint


def completion(content, **choice) -> dict:
    """A chat completion that says `content`."""
    message = {"role": "assistant", "content": content}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}]}


class Server(http.server.ThreadingHTTPServer):
    """Answers every POST by answer(request, number of the request) -> (status, headers, object)."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.lock = answer, threading.Lock()
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.now, self.most_at_once = 0, 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        """A client that hung up is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with server.lock:
            number = len(server.requests)
            server.requests.append({"path": self.path, **json.loads(body)})
            server.headers.append(dict(self.headers))
            server.now += 1
            server.most_at_once = max(server.most_at_once, server.now)
        try:
            status, headers, found = server.answer(server.requests[number], number)
        finally:
            with server.lock:
                server.now -= 1
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Nothing."""


@contextlib.contextmanager
def serving(answer):
    """A server on a free port of 127.0.0.1, for as long as the block lasts."""
    server = Server(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def raw_server(talk):
    """talk(connection) is called with every connection, after its request was read; -> base_url."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    over = threading.Event()

    def handle(connection):
        with connection, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            talk(connection, over)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def reset(connection) -> None:
    """Close with RST, as a crashed peer does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def skip_waits(monkeypatch) -> list[float]:
    """The seconds that the client has waited between attempts, from now on: they pass at once."""
    begun, waits = time.monotonic(), []
    clock = types.SimpleNamespace(monotonic=lambda: begun + sum(waits), sleep=waits.append)
    monkeypatch.setattr(endpoint, "time", clock)
    return waits


def closed_port() -> int:
    """A port of 127.0.0.1 on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
