"""A probe on this machine: what it answers, and how it ends."""

import asyncio
import os
import sys

import pytest

from hvdkit.install.hosts.party import Party, UnreachableError, ssh_command
from hvdkit.install.hosts.probe import find_way

QUESTION = {
    "hosts": ["localhost", "nobody.invalid"],
    "launcher": "127.0.0.1",
    "folder": "/",
    "environment": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    "token": "a token",
    "package_deadline_s": 30,
    "deadline_s": 60,
}


def converse(talk):
    """Run a conversation with a probe on this machine, and end the probe."""

    async def run():
        party = Party("here", True, None, None)
        await party.start()
        try:
            return await talk(party)
        finally:
            await party.close()

    return asyncio.run(run())


def test_what_a_probe_answers():
    async def talk(party):
        answer = await party.ask(QUESTION, 60)
        targets = {"itself": ("127.0.0.1", answer["port"]), "nobody": ("127.0.0.1", 9)}
        right = await party.ask({"targets": targets, "token": "a token"}, 30)
        wrong = await party.ask({"targets": targets, "token": "another"}, 30)
        return answer, right, wrong

    answer, right, wrong = converse(talk)
    assert answer["folder"] is True
    assert answer["way"] == find_way("127.0.0.1") == "127.0.0.1"
    assert answer["addresses"]["lo"] == "127.0.0.1"
    assert answer["names"] == {"localhost": "127.0.0.1", "nobody.invalid": None}
    assert answer["cores"] == len(os.sched_getaffinity(0))
    assert answer["doctor"]["python"] == answer["python"]
    assert right["itself"] == ""
    assert "refused" in right["nobody"]
    assert wrong["itself"] == "something else answers there"


def test_a_probe_without_hvdkit_says_so():
    async def talk(party):
        nowhere = {**QUESTION, "environment": {"PYTHONPATH": "", "PYTHONHOME": "/nowhere"}}
        return await party.ask(nowhere, 60)

    answer = converse(talk)
    assert answer["doctor"] is None
    assert answer["doctor_error"]


def test_a_question_that_takes_too_long():
    async def talk(party):
        await party.ask(QUESTION, 0.001)

    with pytest.raises(UnreachableError, match=r"no answer within 0\.001 s") as caught:
        converse(talk)
    assert caught.value.topic == "probe"
    assert "--timeout" in caught.value.remedy


def test_a_probe_that_fails_says_why():
    async def talk(party):
        await party.ask({"nonsense": 1}, 30)

    with pytest.raises(UnreachableError, match="KeyError"):
        converse(talk)


def test_without_ssh(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    async def start():
        await Party("there", False, None, None).start()

    with pytest.raises(UnreachableError, match="no such program: ssh"):
        asyncio.run(start())


def test_ssh_has_the_options_of_horovodrun(tmp_path):
    words = ssh_command("there", "true", 2222, tmp_path / "key")
    assert words == [
        *("ssh", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no"),
        *("-o", "BatchMode=yes", "there", "-p", "2222", "-i", str(tmp_path / "key")),
        *("-o", "ConnectTimeout=10", "true"),
    ]
