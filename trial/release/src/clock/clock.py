"""An HTTP server that counts its visits in a file on the persistent disk."""

import http.server
import sys
from pathlib import Path

GREETING, STORE = sys.argv[1], Path(sys.argv[2])


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer with the greeting and the number of visits."""
        visits = int(STORE.read_text()) + 1 if STORE.exists() else 1
        STORE.write_text(str(visits))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{GREETING}, visit {visits}\n".encode())


http.server.HTTPServer(("", 8080), Page).serve_forever()
