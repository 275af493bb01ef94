"""Signed commands."""
import pytest

from kvstore.errors import ProtocolError
from kvstore.job import commands
from kvstore.job.commands import Signer, Verifier

KEY = b"the secret of the job"


def test_a_signed_command_is_opened() -> None:
    assert Verifier(KEY).verify(Signer(3, KEY).sign("open", {"x": [1, "é"]})) == (3, "open", {"x": [1, "é"]})


def test_a_message_survives_as_a_c_string() -> None:
    message = Signer(0, KEY).sign("open", {"text": "a\0b é"})
    assert message.isascii() and "\0" not in message


@pytest.mark.parametrize("message", ["", "\x80\x03csomething", "cos\nsystem\n(S'id'\ntR.", "a b c d", "1 2"])
def test_an_unsigned_command_is_refused(message: str) -> None:
    with pytest.raises(ProtocolError, match="unsigned command"):
        Verifier(KEY).verify(message)


def test_another_secret_is_refused() -> None:
    with pytest.raises(ProtocolError, match="worker 1 is not signed with this job's secret"):
        Verifier(KEY).verify(Signer(1, b"another").sign("open", {}))


@pytest.mark.parametrize("what", ["sender", "counter", "text"])
def test_no_part_of_a_command_can_be_changed(what: str) -> None:
    sender, counter, signature, text = Signer(1, KEY).sign("open", {"n": 1}).split(" ", 3)
    changed = {"sender": f"2 {counter} {signature} {text}", "counter": f"{sender} 9 {signature} {text}",
               "text": f"{sender} {counter} {signature} {text.replace('1', '2')}"}[what]
    with pytest.raises(ProtocolError, match="not signed"):
        Verifier(KEY).verify(changed)


def test_a_command_cannot_be_played_again() -> None:
    signer, verifier = Signer(0, KEY), Verifier(KEY)
    first, second = signer.sign("open", {}), signer.sign("open", {})
    verifier.verify(first)
    verifier.verify(second)
    for again in (first, second):
        with pytest.raises(ProtocolError, match="a second time"):
            verifier.verify(again)


def test_senders_count_for_themselves() -> None:
    verifier = Verifier(KEY)
    for rank in (0, 1, 2):
        verifier.verify(Signer(rank, KEY).sign("open", {}))


def test_without_a_secret_the_job_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ODSGD_SECRET", raising=False)
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "10.0.0.1")
    assert not commands.trusted()
    monkeypatch.setenv("ODSGD_SECRET", "ab" * 32)
    assert commands.trusted() and commands.job_key() == b"ab" * 32
