"""Object stores on this machine: S3 (moto) and Google Cloud Storage (gcp-storage-emulator).

Each is a process with a free port, which ends with its parent:

    with servers.start("s3") as server:
        os.environ.update(server.environment())
        ...                                             # fsspec reads and writes s3://bucket/...
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading

BUCKET = "bucket"
SCHEMES = {"s3": "s3", "gcs": "gs"}


@dataclasses.dataclass
class Server:
    """A server, and the port under which clients reach it, which may be a proxy's."""

    kind: str
    port: int

    @property
    def url(self):
        return f"{SCHEMES[self.kind]}://{BUCKET}"

    def environment(self, port=0):
        """The variables that direct fsspec's clients to the server, or to a proxy's port."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        if self.kind == "gcs":
            # By default gcsfs asks for the kind of a bucket by gRPC, which the emulator does not have.
            kind = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
            return {"STORAGE_EMULATOR_HOST": endpoint, "FSSPEC_GS_TOKEN": "anon", **kind}
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        return {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1", **keys}


@contextlib.contextmanager
def start(kind):
    """Starts a server with one empty bucket: "s3" or "gcs"."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.object_stores.servers", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Server(kind, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def _serve(kind):
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

    os.environ.update(Server("s3", server.port).environment())
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    return server.port


if __name__ == "__main__":
    print(_serve(sys.argv[1]), flush=True)
    sys.stdin.read()  # until the parent ends
