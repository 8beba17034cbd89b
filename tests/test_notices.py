import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep import notices


@pytest.fixture(autouse=True)
def nothing_said():
    notices.reset()
    yield
    notices.reset()


def test_says_a_key_once(caplog):
    notices.say_once("placed", "placed the state")
    notices.say_once("placed", "placed another state")
    notices.say_once("dropped", "dropped 2 rows")
    assert caplog.messages == ["placed the state", "dropped 2 rows"]


def test_speaks_as_the_library_and_as_a_warning(caplog):
    notices.say_once("placed", "100% placed")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("lockstep", logging.WARNING)
    assert record.getMessage() == "100% placed"


def test_takes_another_level(caplog):
    with caplog.at_level(logging.INFO, logger="lockstep"):
        notices.say_once("quiet", "by the way", level=logging.INFO)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_reset_lets_it_speak_again(caplog):
    notices.say_once("placed", "one")
    notices.reset()
    notices.say_once("placed", "two")
    assert caplog.messages == ["one", "two"]


def test_threads_say_it_once(caplog):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: notices.say_once("same", "once"), range(64)))
    assert caplog.messages == ["once"]
