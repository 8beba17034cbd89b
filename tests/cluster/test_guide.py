"""docs/cluster.md says what is so."""

import inspect
import re

import pytest
from cluster.launches import ROOT

import lockstep as ls

pytestmark = pytest.mark.cluster

PAGE = ROOT / "docs" / "cluster.md"
TEXT = PAGE.read_text()


def test_the_table_has_the_losses_of_one_process(losses_alone):
    rows = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\|$", TEXT, re.M)
    assert len(rows) == 5
    for row in rows:
        for step, shown in zip((200, 400, 1200), row, strict=True):
            if shown:
                assert float(shown) == pytest.approx(losses_alone[step], rel=1e-6)


def test_the_call_of_ray_is_one_that_it_takes():
    call = re.search(r"ls\.ray\.fit(\(.*?\n\s+max_restarts=3\))", TEXT, re.S)
    assert call
    arguments = eval(f"(lambda *a, **k: (a, k)){call.group(1)}")
    inspect.signature(ls.ray.fit).bind(*arguments[0], **arguments[1])


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT)
    assert len(links) >= 3
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
