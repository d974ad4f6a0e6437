"""A chat endpoint that grades by a rule: for trying `judge` before a model that grades is there.

python examples/rule_judge.py [--port=8000] [--delay_s=0]

It answers as an OpenAI-compatible server does, and reads the message that the reward `judge` writes
with its own template. The rule is `grade`: change it. What is true of a model is true of it: a
request takes `--delay_s`, and as many are answered at once as come.
"""

import argparse
import http.server
import json
import re
import time


def grade(task: str, response: str, scale: float) -> float:
    """Full marks for the first letter of the task and nothing else, a tenth for one letter."""
    if response.strip() == task[:1]:
        return scale
    return scale / 10 if len(response.strip()) == 1 else 0.0


def verdict(message: str) -> str:
    """The answer to a message of `judge`: the score as JSON."""
    shown = dict(re.findall(r"^(Task|Response): (.*)$", message, re.MULTILINE))
    scale = re.search(r"from 0 \(not at all\) to (\S+) \(perfectly\)", message)
    task, response = (json.loads(shown[name]) for name in ("Task", "Response"))
    return json.dumps({"score": grade(task, response, float(scale[1]))})


class Handler(http.server.BaseHTTPRequestHandler):
    delay_s = 0.0

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.delay_s)
        message = {"role": "assistant", "content": verdict(request["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        data = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """One line for each request is too many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--delay_s", type=float, default=0.0)
    options = parser.parse_args()
    Handler.delay_s = options.delay_s
    server = http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    print(
        f"--config.reward.function=\"judge(base_url='http://127.0.0.1:{server.server_port}/v1', "
        "model='rule')\"",
        flush=True,
    )
    server.serve_forever()


if __name__ == "__main__":
    main()
