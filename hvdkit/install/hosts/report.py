"""What is known of a host, of the launcher, and what was found: the words of `doctor --hosts`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hvdkit.install.findings import Level
from hvdkit.install.hosts.listing import HostSlots

__all__ = ["HostFinding", "HostReport", "Launch", "merge"]

_ORDER = ("fault", "warning", "ok")


@dataclass(frozen=True)
class HostFinding:
    """What was found about one topic on one or more hosts.

    Attributes:
        hosts: Their names.
        topic: One or two words, for example "ssh".
        level: "fault" when the job cannot work, "warning" when it may not, otherwise "ok".
        text: What was found.
        remedy: What to do about it, or "".
    """

    hosts: tuple[str, ...]
    topic: str
    level: Level
    text: str
    remedy: str = ""


@dataclass
class HostReport:
    """What is known of one host.

    Attributes:
        host: Its name and slots.
        address: What its name stands for on the launcher; None where it does not resolve.
        local: Whether horovodrun takes it for its own machine.
        listed: Whether it runs workers; False for the launcher's machine where it runs none.
        failure: Why no probe answered there, or None.
        answer: What the probe found.
        reached: Name of another host to "", or to why it was not reached from here.
        asked_s: The launcher's clock when the probe was asked.
        answered_s: The same when it had answered.
    """

    host: HostSlots
    address: str | None
    local: bool = False
    listed: bool = True
    failure: HostFinding | None = None
    answer: dict[str, Any] | None = None
    reached: dict[str, str] = field(default_factory=dict)
    asked_s: float = 0.0
    answered_s: float = 0.0

    @property
    def name(self) -> str:
        """The host's name."""
        return self.host.name


@dataclass(frozen=True)
class Launch:
    """How horovodrun would start the job.

    Attributes:
        address: That of the launcher, where the workers meet.
        interfaces: Those that the user names, in order; none for a free choice.
        named_by: Where; the option holds on the launcher too, the variable only for workers.
        choosing: Whether each host chooses its address, as with a Horovod that hvdkit built; else
            all need a common interface name, and each other's names.
    """

    address: str
    interfaces: tuple[str, ...] = ()
    named_by: Literal["--network-interfaces", "HOROVOD_GLOO_IFACE"] = "--network-interfaces"
    choosing: bool = True

    def choose_address(self, answer: Mapping[str, Any]) -> str | None:
        """Return the address that a host's workers would be reached at; None where none fits."""
        if not self.interfaces:
            return answer["way"]
        addresses = answer["addresses"]
        return next((addresses[name] for name in self.interfaces if name in addresses), None)


def merge(findings: Iterable[HostFinding]) -> list[HostFinding]:
    """Join what is the same on several hosts; faults first, then warnings."""
    joined: dict[tuple[str, ...], HostFinding] = {}
    for one in findings:
        key = (one.topic, one.level, one.text, one.remedy)
        before = joined[key].hosts if key in joined else ()
        hosts = tuple(dict.fromkeys([*before, *one.hosts]))
        joined[key] = HostFinding(hosts, one.topic, one.level, one.text, one.remedy)
    return sorted(joined.values(), key=lambda one: _ORDER.index(one.level))
