"""Object stores on this machine: S3 (moto) and Google Cloud Storage (gcp-storage-emulator).

Each is a process with a free port, which ends with its parent:

    with servers.start("s3") as server:
        os.environ.update(server.environment())
        ...                                             # fsspec reads and writes s3://bucket/...
"""

import contextlib
import dataclasses
import http.server
import socketserver
import subprocess
import sys
import threading
import time

from benchmarks.storage.proxy import Proxy

SINK_SPEED = 50e6  # of each connection
BUCKET = "bucket"
SCHEMES = {"s3": "s3", "gcs": "gs", "sink": "s3"}


@dataclasses.dataclass
class Server:
    """A server, and the port under which clients reach it, which may be a proxy's."""

    kind: str
    port: int
    process: subprocess.Popen

    @property
    def url(self):
        return f"{SCHEMES[self.kind]}://{BUCKET}"

    def environment(self, port=0):
        """The variables that direct fsspec's clients to the server, or to a proxy's port."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        if self.kind == "gcs":
            # By default gcsfs asks for the kind of a bucket by gRPC, which the emulator does not have.
            return {
                "STORAGE_EMULATOR_HOST": endpoint,
                "FSSPEC_GS_TOKEN": "anon",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            }
        return {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextlib.contextmanager
def start(kind):
    """Starts a server with one empty bucket: "s3", "gcs", or "sink", which drops what it gets."""
    with _process(kind) as (process, port):
        yield Server(kind, port, process)


@contextlib.contextmanager
def delayed(server, seconds):
    """Starts a proxy that adds seconds to each request; yields its port."""
    with _process("proxy", server.port, seconds) as (_, port):
        yield port


@contextlib.contextmanager
def _process(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.storage.servers", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def _serve(kind):
    if kind == "sink":
        sink = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Sink)
        threading.Thread(target=sink.serve_forever, daemon=True).start()
        return sink.server_address[1]
    if kind == "gcs":
        from gcp_storage_emulator.server import create_server

        gcs = create_server("127.0.0.1", 0, True, BUCKET)
        gcs.start()
        return gcs._api._httpd.server_address[1]
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_bucket(Bucket=BUCKET)
    return server.port


class _Sink(http.server.BaseHTTPRequestHandler):
    """Answers the requests of an upload to S3, and takes `SINK_SPEED` bytes per second of each."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        left = int(self.headers["Content-Length"])
        while left:
            part = self.rfile.read(min(left, 2**20))
            left -= len(part)
            time.sleep(len(part) / SINK_SPEED)
        self._answer(b"")

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = "InitiateMultipartUploadResult" if "uploads" in self.path else "Result"
        self._answer(f"<{name}><UploadId>1</UploadId><ETag>1</ETag></{name}>".encode())

    def _answer(self, body):
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def _delay(port, seconds):
    proxy = Proxy(int(port)).__enter__()
    proxy.delay = float(seconds)
    return proxy.port


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    print(_delay(*rest) if kind == "proxy" else _serve(kind), flush=True)
    sys.stdin.read()  # until the parent ends
