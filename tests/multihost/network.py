"""Hosts on one machine: each has a network, a name, processes and an ``/etc/hosts`` of its own.

A host is a set of namespaces that one keeper process holds. Cables (veth pairs) join them to a
bridge, in a namespace of its own too. The keepers read from this process: whatever ends it ends
them, all processes in their namespaces, and with those every interface. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.system.ssh_server import SshServer, make_key, write_client

__all__ = ["SSH_PORT", "Host", "Network", "join"]

SSH_PORT = 22
GRACE_S = 15.0
SUBNET = "10.77.0"


class _Namespaces:
    """Namespaces that exist as long as their keeper, a process without a job."""

    def __init__(self, script: str) -> None:
        kinds = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._keeper = subprocess.Popen(
            ["unshare", *kinds, "sh", "-ec", f"{script}\necho ready\nexec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        ready = self._keeper.stdout.readline() == "ready\n"
        # The child of unshare is the first process of the namespaces.
        children = psutil.Process(self._keeper.pid).children() if ready else []
        if not children:
            self.end()
            raise AssertionError("namespaces could not be made")
        self.pid = children[0].pid

    def enter(self, *words: str, folder: str = "/") -> list[str]:
        """Return a command that runs ``words`` inside, in a folder."""
        kinds = ["--net", "--uts", "--mount", "--pid"]
        return ["nsenter", f"--target={self.pid}", *kinds, "env", f"--chdir={folder}", *words]

    def set_network(self, *words: str) -> None:
        """Run ``ip`` in its network; process ids mean those of this machine."""
        command = ["nsenter", f"--target={self.pid}", "--net", "ip", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a short command inside."""
        done = subprocess.run(
            self.enter(*words), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr}"
        return done

    def end(self) -> None:
        """End every process inside."""
        self._keeper.kill()  # and by that its child: --kill-child
        self._keeper.wait()
        for stream in (self._keeper.stdin, self._keeper.stdout):
            assert stream is not None
            stream.close()


class Host(_Namespaces):
    """One host.

    Attributes:
        name: Its host name.
        address: Its IPv4 address.
        interface: The name of its network interface.
        ssh: Its OpenSSH server.
    """

    def __init__(
        self, name: str, address: str, interface: str, folder: Path, identity: Path
    ) -> None:
        self.name, self.address, self.interface = name, address, interface
        folder.mkdir()
        self._names = folder / "hosts"
        self._names.touch()
        super().__init__(
            f"hostname {name}\nmount --bind {self._names} /etc/hosts\nip link set lo up"
        )
        self.ssh = SshServer(
            folder, ["0.0.0.0"], SSH_PORT, identity.with_suffix(".pub"), self.enter()
        )

    def set_names(self, names: Mapping[str, str]) -> None:
        """Write ``/etc/hosts``: name to address."""
        lines = "".join(f"{address} {name}\n" for name, address in names.items())
        self._names.write_text(f"127.0.0.1 localhost\n{lines}")

    def answers(self) -> bool:
        """Whether its ssh server can be reached, from itself."""
        found = self.run("ss", "-Hltn", f"sport = :{SSH_PORT}", check=False)
        return bool(found.stdout.strip())

    def list_processes(self) -> list[psutil.Process]:
        """List its processes, without its keeper and its ssh server."""
        found = []
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                inside = os.readlink(f"/proc/{process.pid}/ns/pid") == own
                kept = process.pid == self.pid or process.name().startswith("sshd")
                # Its keeper is the parent of orphans, and leaves them as zombies.
                if inside and not kept and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def await_no_process(self, grace_s: float = GRACE_S) -> list[str]:
        """Wait for the end of all of its processes; return those that stay, as text."""
        deadline = time.monotonic() + grace_s
        while (found := self.list_processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = []
        for process in found:
            with contextlib.suppress(psutil.Error):
                left.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        return left


class Network:
    """Hosts that a bridge joins.

    Attributes:
        hosts: Name to host.
        identity: The private key that lets each into all others.
        path: A folder with an ``ssh`` that leaves no traces.
    """

    def __init__(self, folder: Path) -> None:
        self.hosts: dict[str, Host] = {}
        self.identity = make_key(folder / "key")
        self.path = write_client(folder / "bin")
        self._folder = folder
        self._bridge = _Namespaces("ip link add bridge type bridge\nip link set bridge up")

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def add(self, name: str, interface: str) -> Host:
        """Add a host, and join it to the others."""
        address = f"{SUBNET}.{len(self.hosts) + 1}"
        host = Host(name, address, interface, self._folder / name, self.identity)
        self.hosts[name] = host
        # The port of the bridge has the name of the host.
        cable = ["name", name, "type", "veth", "peer", "name", interface, "netns", str(host.pid)]
        self._bridge.set_network("link", "add", *cable)
        self._bridge.set_network("link", "set", name, "master", "bridge", "up")
        host.set_network("address", "add", f"{address}/24", "dev", interface)
        host.set_network("link", "set", interface, "up")
        return host

    def cut_off(self, name: str) -> None:
        """Pull a host's cable."""
        self._bridge.set_network("link", "set", name, "down")

    def connect(self, name: str) -> None:
        """Put a host's cable back."""
        self._bridge.set_network("link", "set", name, "up")

    def know_each_other(self) -> None:
        """Write all names into the ``/etc/hosts`` of each host."""
        names = {host.name: host.address for host in self.hosts.values()}
        for host in self.hosts.values():
            host.set_names(names)

    def end(self) -> None:
        """End all hosts."""
        for host in self.hosts.values():
            host.end()
        self._bridge.end()


@contextlib.contextmanager
def join(folder: Path, interfaces: Sequence[str]) -> Iterator[Network]:
    """Make hosts named hosta, hostb and so on, with these interfaces; end them with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        network = Network(folder)
        stack.callback(network.end)
        for letter, interface in zip("abcdefgh", interfaces, strict=False):
            network.add(f"host{letter}", interface)
        network.know_each_other()
        for host in network.hosts.values():
            stack.enter_context(host.ssh.running(host.answers))
        yield network
