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
        self.num_steps = self.num_tokens = 0


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
            elif self.path == "/metrics" and options.metrics:
                self._text(200, counters(options.metrics, seen), "text/plain")
            elif self.path == "/seen":
                self._json(200, {"bodies": seen.bodies, "most": seen.most_in_flight})
            else:
                self._json(404, {"error": {"message": "no such path"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            if self.path != known:
                self._json(404, {"error": {"message": f"no such path: {self.path}"}})
                return
            with seen.lock:
                seen.bodies.append(body)
                number = len(seen.bodies)
                seen.in_flight += 1
                seen.most_in_flight = max(seen.most_in_flight, seen.in_flight)
            seen.together.wait(60)
            self._answer(body, number)

        def _answer(self, body: dict, number: int) -> None:
            stream_options = {} if options.plain else body.get("stream_options", {})
            reason = refusal(options, body)
            if reason is not None:
                self._leave()
                self._json(reason[0], {"error": {"message": reason[1]}})
                return
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
            total, num_sent = body.get("max_tokens") or body["max_completion_tokens"], 0
            with seen.lock:
                seen.num_tokens += total
                seen.num_steps += -(-total // options.per_event)
            while num_sent < total:
                time.sleep(options.delay_s)
                count = min(options.per_event, total - num_sent)
                num_sent += count
                text = "word " * count
                said = {"delta": {"content": text}} if "messages" in body else {"text": text}
                event = {"choices": [{"index": 0, **said}]}
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
            self._text(status, json.dumps(answer), "application/json")

        def _text(self, status: int, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def refusal(options: argparse.Namespace, body: dict) -> tuple[int, str] | None:
    """Status and message for what a server of OpenAI's fields only does not take."""
    if not options.plain:
        return None
    if body["model"] != "fake":
        return 404, f"The model `{body['model']}` does not exist."
    if "ignore_eos" in body:
        return 400, "Unrecognized request argument supplied: ignore_eos"
    if "continuous_usage_stats" in body.get("stream_options", {}):
        return 400, "Unknown parameter: 'stream_options.continuous_usage_stats'."
    if options.newer and "max_tokens" in body:
        return 400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    return None


def counters(prefix: str, seen: Seen) -> str:
    """Of drafts, in Prometheus' text: each step drafts `per_event`, and accepts all but one."""
    accepted = seen.num_tokens - seen.num_steps
    values = {
        "drafts_total": seen.num_steps,
        "draft_tokens_total": seen.num_tokens,
        "accepted_tokens_total": accepted,
        'accepted_tokens_per_pos_total{position="0"}': accepted,
    }
    return "".join(f"{prefix}:spec_decode_num_{name} {each}\n" for name, each in values.items())


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
    parser.add_argument("--metrics", default="", help="counters of drafts under this prefix")
    parser.add_argument("--plain", action="store_true", help="OpenAI's fields only, and no usage")
    parser.add_argument("--newer", action="store_true", help="max_tokens is refused")
    return parser.parse_args(words)


def serve(*words: str) -> ThreadingHTTPServer:
    """A server in a thread of this process, on a port of its own."""
    options = arguments(list(words))
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler(options))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


if __name__ == "__main__":
    options = arguments(sys.argv[1:])
    ThreadingHTTPServer(("127.0.0.1", options.port), handler(options)).serve_forever()
