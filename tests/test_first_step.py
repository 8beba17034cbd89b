"""A visitor sees one step, before it runs."""

import numpy as np
import pytest

from lockstep import first_step
from lockstep.parallel import parallelize


def test_a_visitor_is_called_once_before_the_step():
    seen = []
    first_step.visit_next(lambda *call: seen.append(call))
    assert first_step.waiting()
    step = parallelize(lambda w, x, lr: (w - lr * x.mean(), None))
    x = np.ones(8, np.float32)
    step(1.0, x, lr=0.5)
    step(1.0, x, lr=0.5)
    assert seen == [(step, (1.0, x), {"lr": 0.5})]
    assert not first_step.waiting()


def test_a_visitor_may_stop_the_step_and_run_others():
    ran = []

    def visit(step, args, kwargs):
        parallelize(lambda w, x: (w, ran.append(1)))(*args)
        raise SystemExit(3)

    first_step.visit_next(visit)
    with pytest.raises(SystemExit):
        parallelize(lambda w, x: (w, ran.append(2)))(1.0, np.ones(8, np.float32))
    assert ran == [1]
