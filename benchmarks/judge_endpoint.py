"""The cost of a judge behind an endpoint beside the endpoint's own time: requests per second and
the most in flight for 1, 2, 4, ... workers, against a server on this machine that answers after a
fixed time. Prints JSON.

    python benchmarks/judge_endpoint.py --latency_s=0.1 --samples=400
"""

import argparse
import http.server
import json
import os
import platform
import statistics
import threading
import time

from rljax.rewards.pool.pool import RewardPool

ANSWER = json.dumps(
    {"choices": [{"message": {"content": '{"score": 5}'}, "finish_reason": "stop"}]}
).encode()


class Server(http.server.ThreadingHTTPServer):
    """Answers after `latency_s`, and counts the requests that wait."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, latency_s: float):
        super().__init__(("127.0.0.1", 0), Handler)
        self.latency_s, self.lock = latency_s, threading.Lock()
        self.in_flight = self.most_in_flight = 0

    def count(self, step: int) -> None:
        with self.lock:
            self.in_flight += step
            self.most_in_flight = max(self.most_in_flight, self.in_flight)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.count(1)
        time.sleep(self.server.latency_s)
        self.server.count(-1)
        self.send_response(200)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, *_):
        """Prints nothing."""


def measure(server: Server, workers: int, samples: int, repeats: int) -> dict:
    """Requests per second over `repeats` rounds of one pool, after a first one."""
    url = f"http://127.0.0.1:{server.server_port}/v1"
    items = [{"response": f"response {i}", "prompt": "p"} for i in range(samples)]
    rates, failed = [], 0
    with RewardPool(f"judge(base_url={url!r}, model='m')", workers=workers) as pool:
        pool.score(items[: 2 * workers])
        server.most_in_flight = 0
        for _ in range(repeats):
            started = time.perf_counter()
            scores = pool.score(items)
            rates.append(samples / (time.perf_counter() - started))
            failed += sum(score.status != "ok" for score in scores)
    return {
        "workers": workers,
        "requests_per_s": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "of_the_floor": statistics.median(rates) * server.latency_s / workers,
        "most_in_flight": server.most_in_flight,
        "failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency_s", type=float, default=0.1)
    parser.add_argument("--samples", type=int, default=400, help="per round")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    server = Server(options.latency_s)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = [measure(server, n, options.samples, options.repeats) for n in options.workers]
    server.shutdown()
    server.server_close()
    machine = {"cpu_count": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({**vars(options), **machine, "load": os.getloadavg(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
