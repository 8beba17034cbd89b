"""Notices that all processes have are logged by one, and no other is lost."""

import logging

import pytest

from lockstep.distributed.shared_notices import SharedNotices
from lockstep.notices import say_once

LOG = logging.getLogger("lockstep")


@pytest.fixture
def notices_of():
    """The notices of a process, and what it sends to the hub."""
    made = []

    def make(index, hold_s=1000.0):
        sent = []
        made.append(SharedNotices(index, sent.append))
        made[-1].install()
        made[-1].hold_s = hold_s
        return made[-1], sent

    yield make
    for notices in made:
        LOG.removeFilter(notices)


def test_process_0_logs_at_once_and_tells_the_hub(notices_of, caplog):
    notices, sent = notices_of(0)
    LOG.warning("on %d devices", 8)
    assert caplog.messages == ["on 8 devices"]
    notices.look()
    assert sent == [{"kind": "said", "text": "on 8 devices"}]


@pytest.mark.parametrize("is_first", [True, False])
def test_what_process_0_logs_is_not_logged_again(notices_of, caplog, is_first):
    notices, sent = notices_of(1)
    said = {"kind": "said", "text": "a"}
    if is_first:
        notices.on_said(said)
    LOG.warning("a")
    notices.look()
    if not is_first:
        assert sent == [{"kind": "held", "texts": ["a"]}]
        notices.on_said(said)
        notices.look()
    assert sent[-1]["texts"] == []
    notices.release()
    assert caplog.messages == []


def test_each_time_counts(notices_of, caplog):
    notices, _ = notices_of(1)
    LOG.warning("a")
    LOG.warning("a")
    notices.on_said({"text": "a"})
    notices.release()
    assert caplog.messages == ["a"]


def test_what_process_0_does_not_log_is_logged_after_a_moment(notices_of, caplog):
    notices, sent = notices_of(1, hold_s=0.0)
    say_once("of one process alone", "only here")
    assert caplog.messages == []
    notices.on_said({"text": "something else"})
    notices.look()
    assert caplog.messages == ["only here"]
    assert sent[-1] == {"kind": "held", "texts": []}


def test_the_end_logs_what_is_held_and_holds_no_more(notices_of, caplog):
    notices, _ = notices_of(1)
    LOG.warning("a")
    notices.release()
    LOG.warning("b")
    assert caplog.messages == ["a", "b"]


def test_the_fault_of_a_handler_is_shown_and_goes_no_further(notices_of, capfd):
    notices, _ = notices_of(1)
    handler = logging.Handler()
    handler.emit = lambda record: 1 / 0
    LOG.addHandler(handler)
    LOG.warning("a")
    notices.release()
    LOG.removeHandler(handler)
    assert "ZeroDivisionError" in capfd.readouterr().err
