"""Runs Python programs in forks of a process that has imported TensorFlow, which takes seconds.

`Popen` is a `subprocess.Popen` of such a fork. The server forks before TensorFlow has made devices or
threads, so a program starts as in a new process, except for what TensorFlow reads when it is imported.
"""

import gc
import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import threading
import time
import types

_POLL_SECONDS = 0.02
_MESSAGE_BYTES = 2**17


class _Server:
    """The server process of this process; it ends when its socket is closed."""

    def __init__(self):
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(other.fileno())],
            cwd=pathlib.Path(__file__).resolve().parents[2],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        other.close()

    def request(self, message, files=()):
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(message).encode()], files)
            return json.loads(self._socket.recv(_MESSAGE_BYTES))


_servers: list[_Server] = []


class Popen(subprocess.Popen):
    """Starts `python -m MODULE` or `-c CODE` in a session of its own; the arguments are `Popen`'s.

    All three standard streams must be given.
    """

    def _execute_child(self, args, *others):
        cwd, env = others[4] or os.getcwd(), others[5]
        streams = others[9:15]  # p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        if not _servers:
            _servers.append(_Server())
        message = {"arguments": [str(a) for a in args], "cwd": str(cwd), "environment": dict(env)}
        self.pid = _servers[0].request(message, [streams[0], streams[3], streams[5]])
        self._child_created = True
        self._close_pipe_fds(*streams)

    def _try_wait(self, wait_flags):
        while True:
            pid, status = _servers[0].request({"wait": self.pid})
            if pid or wait_flags == os.WNOHANG:
                return pid, status
            time.sleep(_POLL_SECONDS)

    def _internal_poll(self, **_):
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def _serve(connection):
    """Answers requests; returns the request in a forked process, and None at the end."""
    while True:
        data, files, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if not data:
            return None
        message = json.loads(data)
        if "wait" in message:
            answer = os.waitpid(message["wait"], os.WNOHANG)
        else:
            reader, writer = os.pipe()
            answer = os.fork()
            if answer == 0:
                connection.close()
                os.setsid()
                os.close(reader)
                os.close(writer)
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                return message
            os.close(writer)
            os.read(reader, 1)  # returns once the process has its session, as `Popen` promises
            for file in (reader, *files):
                os.close(file)
        connection.send(json.dumps(answer).encode())


def main():
    import orbit  # noqa: F401
    import tensorflow  # noqa: F401
    import tf_keras  # noqa: F401

    gc.freeze()  # a garbage collection of a fork would copy all pages with objects
    message = _serve(socket.socket(fileno=int(sys.argv[1])))
    if message is None:
        return
    os.chdir(message["cwd"])
    os.environ.clear()
    os.environ.update(message["environment"])
    _, option, program, *arguments = message["arguments"]
    sys.path[0] = message["cwd"]
    sys.argv[:] = [program, *arguments]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        assert option == "-c"
        # Without a name that the processes of `multiprocessing` would import.
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(program, vars(sys.modules["__main__"]))


if __name__ == "__main__":
    main()
