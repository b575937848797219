"""MCP servers over HTTP, in this process, that answer calls in unusual and hostile ways."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tool_servers import result_of


class HttpToolServer(ThreadingHTTPServer):
    """`call(handler, message)` answers tools/call. `posts` are the methods that came, `url` the address."""

    daemon_threads = True

    def __init__(self, call):
        self.call = call
        self.posts = []
        self.sessions = []
        self.ended = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/mcp"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def __exit__(self, *error):
        self.ended.set()
        self.shutdown()
        super().__exit__(*error)

    def handle_error(self, request, client_address):
        pass  # clients hang up


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "HttpToolServer"

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.posts.append(message.get("method", "answer"))
        if message.get("method") == "tools/call":
            self.server.call(self, message)
        elif "id" in message and "method" in message:
            self.answer(message, result_of(message))
        else:
            self.reply(202)

    def do_DELETE(self):
        self.reply(200)

    def answer(self, message, result):
        body = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        headers = {"Content-Type": "application/json"}
        if message["method"] == "initialize" and self.server.sessions:
            headers["Mcp-Session-Id"] = self.server.sessions[-1]
        self.reply(200, json.dumps(body).encode(), headers)

    def begin_reply(self, kind):
        """Send the status 200 and the content type; the caller writes the body."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def reply(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def write_until_ended(self, pieces, pause_s=0.1):
        """Write pieces with pauses until the test ends or the client hangs up."""
        with contextlib.suppress(OSError):
            for piece in pieces:
                if self.server.ended.wait(pause_s):
                    return
                self.wfile.write(piece)
                self.wfile.flush()

    def log_message(self, *args):
        pass
