"""The run that all launchers have to reproduce: one process, and no launcher."""

import sys

import pytest
from cluster.launches import TRAIN, Launch, losses_in

STEPS = 1200


@pytest.fixture(scope="session")
def losses_alone(tmp_path_factory) -> dict[int, float]:
    """Step -> loss of train.py in one process."""
    folder = tmp_path_factory.mktemp("alone")
    with Launch(sys.executable, TRAIN, "--run", folder) as alone:
        assert alone.finish() == 0, alone.text
    losses = losses_in(alone.text)
    assert list(losses) == list(range(200, STEPS + 1, 200))
    assert losses[200] > losses[STEPS] > 0.1  # it learns, and noise remains
    return losses


@pytest.fixture
def assert_as_alone(losses_alone):
    """Whether a run, or its second part, has the losses of one process."""

    def check(text: str, *, after: int = 0) -> None:
        rest = {step: loss for step, loss in losses_alone.items() if step > after}
        assert rest and losses_in(text) == pytest.approx(rest, rel=1e-6)

    return check
