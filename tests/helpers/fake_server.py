"""An OpenAI-compatible server that streams numbers, as a program: what clients are tested against.

`python fake_server.py --port N` and options for how it misbehaves. `GET /seen` says what came.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Seen:
    """Counts over all requests, and where `num_together` of them wait for one another."""

    def __init__(self, num_together: int) -> None:
        self.together = threading.Barrier(num_together)
        self.lock = threading.Lock()
        self.bodies: list[dict] = []
        self.in_flight = self.most_in_flight = 0


def handler(options: argparse.Namespace) -> type[BaseHTTPRequestHandler]:
    seen = Seen(options.together)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._json(200, {"data": [{"id": "fake"}]})
            elif self.path == "/version":
                self._json(200, {"version": "1.2.3"})
            elif self.path == "/seen":
                self._json(200, {"bodies": seen.bodies, "most": seen.most_in_flight})
            else:
                self._json(404, {"error": {"message": "no such path"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.lock:
                seen.bodies.append(body)
                number = len(seen.bodies)
                seen.in_flight += 1
                seen.most_in_flight = max(seen.most_in_flight, seen.in_flight)
            seen.together.wait(60)
            self._answer(body, number)

        def _answer(self, body: dict, number: int) -> None:
            stream_options = body.get("stream_options", {})
            if options.die_at == number:
                sys.stderr.write("out of luck\n")
                os._exit(3)
            if options.strict and "continuous_usage_stats" in stream_options:
                self._leave()
                self._json(400, {"error": {"message": "continuous_usage_stats: unknown"}})
                return
            if options.fail_every and number % options.fail_every == 0:
                self._leave()
                self._json(500, {"error": {"message": "a bad day"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self._stream(body, stream_options)

        def _stream(self, body: dict, stream_options: dict) -> None:
            total, num_sent = body["max_tokens"], 0
            while num_sent < total:
                time.sleep(options.delay_s)
                count = min(options.per_event, total - num_sent)
                num_sent += count
                event = {"choices": [{"index": 0, "text": "word " * count}]}
                if stream_options.get("continuous_usage_stats"):
                    event["usage"] = {"prompt_tokens": 5, "completion_tokens": num_sent}
                self._event(event)
                if options.cut:
                    self._leave()
                    return
            usage = {"prompt_tokens": 5, "completion_tokens": total}
            if options.speculates:
                usage["speculation"] = {
                    "num_steps": -(-total // options.per_event),
                    "num_draft_tokens": total,
                    "num_accepted_tokens": total - -(-total // options.per_event),
                }
            if stream_options.get("include_usage"):
                self._event({"choices": [], "usage": usage})
            self._leave()
            self.wfile.write(b"data: [DONE]\n\n")

        def _leave(self) -> None:
            """Before the end of the answer, upon which a client may send the next request."""
            with seen.lock:
                seen.in_flight -= 1

        def _event(self, event: dict) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def _json(self, status: int, answer: dict) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-s", type=float, default=0.001)
    parser.add_argument("--per-event", type=int, default=1)
    parser.add_argument("--fail-every", type=int, default=0)
    parser.add_argument("--die-at", type=int, default=0, help="request that ends the process")
    parser.add_argument("--together", type=int, default=1, help="requests that wait for all")
    parser.add_argument("--cut", action="store_true", help="streams end after an event")
    parser.add_argument("--strict", action="store_true", help="no continuous usage")
    parser.add_argument("--speculates", action="store_true")
    return parser.parse_args(words)


def serve(*words: str) -> ThreadingHTTPServer:
    """A server in a thread of this process, on a port of its own."""
    options = arguments(list(words))
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler(options))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    options = arguments(sys.argv[1:])
    ThreadingHTTPServer(("127.0.0.1", options.port), handler(options)).serve_forever()
