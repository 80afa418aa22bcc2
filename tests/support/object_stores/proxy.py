"""A proxy in front of an object store that is slow or fails, in a thread of this process."""

import asyncio
import contextlib
import http.client
import re
import threading
import urllib.parse


class Proxy:
    """Forwards HTTP requests to a server, one per connection.

        with Proxy(server.port) as proxy:
            proxy.fault = lambda method, path, headers: 503 if method == "PUT" else None

    Args:
        port: the port of the server.

    Attributes:
        port: the port of the proxy.
        bytes_per_second: how fast request bodies are accepted; 0 for no limit.
        fault: None, or a function of the method, the path and the headers (in lower case) of a request,
            which returns None, a status to answer with, or "cut", to close the connection in the middle
            of the body.
    """

    def __init__(self, port):
        self._server_port = port
        self.port = 0
        self.bytes_per_second, self.fault = 0, None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        start = asyncio.start_server(self._answer, "127.0.0.1", 0, limit=2**20)
        server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel(self):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._forward(reader, writer)
        writer.close()

    async def _forward(self, reader, writer):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
        method, path, _ = lines[0].split(" ")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        lower = {name.lower(): value for name, value in headers.items()}
        fault = self.fault and self.fault(method, path, lower)
        if lower.get("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault == "cut":
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readexactly(int(lower.get("content-length", 0)) // 2)
            return
        body = await self._read_body(reader, lower)
        fault = fault or await self._precondition(path, body)
        if fault:
            reason = http.client.responses[fault]
            text = f"HTTP/1.1 {fault} {reason}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            writer.write(text.encode())
            await writer.drain()
            return
        kept = [x for x in lines[1:-2] if not x.lower().startswith(("connection:", "expect:"))]
        head = "\r\n".join([lines[0], *kept, "Connection: close", "", ""]).encode("latin1")

        async def write(part):
            writer.write(part)
            await writer.drain()

        await self._relay(head + body, write)

    async def _read_body(self, reader, headers):
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = b""
            while True:
                line = await reader.readline()
                chunk = await reader.readexactly(int(line.split(b";")[0], 16) + 2)
                body += line + chunk
                if chunk == b"\r\n":
                    return body
        left, parts = int(headers.get("content-length", 0)), []
        while left:
            part = await reader.readexactly(min(left, 2**20))
            left -= len(part)
            parts.append(part)
            if self.bytes_per_second:
                await asyncio.sleep(len(part) / self.bytes_per_second)
        return b"".join(parts)

    async def _relay(self, request, write):
        """Sends a request to the server, and passes the parts of its response to `write`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port, limit=2**20)
        try:
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            await write(head)
            length = re.search(rb"content-length: (\d+)", head.lower())
            left = int(length[1]) if length else 2**62  # else until the connection is closed
            if request.startswith(b"HEAD") or head.split(b" ")[1] in (b"204", b"304"):
                left = 0
            while left and (part := await reader.read(min(left, 2**20))):
                left -= len(part)
                await write(part)
        finally:
            writer.close()

    async def _precondition(self, path, body):
        """The status of a failed if-generation-match, which gcp-storage-emulator does not check."""
        url = urllib.parse.urlparse(path)
        name = re.search(rb'"name": "([^"]*)"', body)
        if "ifGenerationMatch=0" not in url.query or not name:
            return None
        target = url.path.replace("/upload", "") + "/" + urllib.parse.quote(name[1], safe="")
        answer = b""

        async def write(part):
            nonlocal answer
            answer += part

        await self._relay(f"GET {target} HTTP/1.0\r\n\r\n".encode(), write)
        return 412 if b" 200 " in answer[:20] else None
