"""What runs on each host for `hvdkit doctor --hosts`: says what is there, and whom it reaches.

It is sent through ssh to a host's Python, where hvdkit may be missing or another: the standard
library alone, and the syntax of Python 3.7. Each line of input is a question, a JSON object; its
answer is a line of output that starts with ``MARK``. The end of the input ends it.
"""

import concurrent.futures
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

__all__ = ["MARK", "find_way", "list_addresses"]

MARK = "hvdkit-probe: "
_SIOCGIFADDR = 0x8915
_NOBODY = "192.0.2.1"  # RFC 5737
_RESOLVE_S = 10.0
_CONNECT_S = 5.0


def list_addresses():
    """Return interface name to IPv4 address, for the interfaces that have one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def find_way(address):
    """Return the own address that packets to an address come from; None where no way leads."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


def main():
    """Answer questions until the input ends."""
    listener = None
    for line in sys.stdin:
        question = json.loads(line)
        if "deadline_s" in question:
            signal.alarm(int(question["deadline_s"]) + 1)  # never stay behind
            listener, error = _listen(question["token"])
            answer = _describe(question)
            answer["port"] = listener.getsockname()[1] if listener else None
            answer["port_error"] = error
        else:
            answer = _reach(question["targets"], question["token"])
        sys.stdout.write(MARK + json.dumps(answer) + "\n")
        sys.stdout.flush()
    os._exit(0)  # without waiting for threads


def _describe(question):
    package = _Package(question["environment"], question["package_deadline_s"])
    addresses = list_addresses()
    names = _resolve(question["hosts"])
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "folder": os.path.isdir(question["folder"]),
        "cores": len(os.sched_getaffinity(0)),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "time_s": time.time(),
        "addresses": addresses,
        "way": find_way(question["launcher"]),
        "names": names,
        "doctor": package.wait(),
        "doctor_error": package.error,
    }


class _Package:
    """`hvdkit doctor` on this host, in the environment that horovodrun gives to workers."""

    def __init__(self, environment, deadline_s):
        self.error = ""
        self._deadline_s = deadline_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hvdkit.cli", "doctor", "--json"],
            cwd="/",  # no folder named torch is there
            env=dict(os.environ, **environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            errors="replace",
        )

    def wait(self):
        """Return what it printed; None, with ``error`` set, where that is no report."""
        try:
            output, errors = self._process.communicate(timeout=self._deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            self.error = f"no end within {self._deadline_s:g} s"
            return None
        try:
            return json.loads(output)
        except ValueError:
            lines = errors.strip().splitlines() or [f"exit code {self._process.returncode}"]
            self.error = lines[-1]
            return None


def _resolve(hosts):
    """Return host name to address, None for one that does not resolve."""

    def ask(host):
        try:
            return socket.gethostbyname(host)
        except OSError:
            return None

    pool = concurrent.futures.ThreadPoolExecutor(max(1, len(hosts)))
    futures = {host: pool.submit(ask, host) for host in hosts}
    concurrent.futures.wait(futures.values(), timeout=_RESOLVE_S)
    return {host: future.result() if future.done() else None for host, future in futures.items()}


def _listen(token):
    """Listen on a free port of all addresses, and greet whoever comes."""
    listener = socket.socket()
    try:
        listener.bind(("", 0))
        listener.listen(128)
    except OSError as error:
        return None, str(error)

    def greet():
        while True:
            caller, _ = listener.accept()
            try:
                caller.sendall(token.encode())
            except OSError:
                pass
            finally:
                caller.close()

    threading.Thread(target=greet, daemon=True).start()
    return listener, ""


def _reach(targets, token):
    """Return target name to "", or to what went wrong with a connection to it."""

    def call(place):
        try:
            with socket.create_connection(tuple(place), timeout=_CONNECT_S) as caller:
                caller.settimeout(_CONNECT_S)
                greeting = b""
                while len(greeting) < len(token):
                    part = caller.recv(len(token) - len(greeting))
                    if not part:
                        break
                    greeting += part
        except OSError as error:
            return str(error)
        return "" if greeting == token.encode() else "something else answers there"

    with concurrent.futures.ThreadPoolExecutor(max(1, len(targets))) as pool:
        futures = {name: pool.submit(call, place) for name, place in targets.items()}
    return {name: future.result() for name, future in futures.items()}


if __name__ == "__main__":
    main()
