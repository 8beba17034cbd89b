"""A run is killed again and again, on changing devices, and ends with the same bits."""

import json

import pytest
from soak import kill9


@pytest.mark.full
def test_ten_kills(tmp_path):
    said = kill9.soak(kills=10, seed=1, folder=tmp_path)
    assert said.startswith("10 kills")


def test_the_comparison_sees_a_step_that_was_done_otherwise(tmp_path):
    """The soak itself can fail: another loss, a row seen twice, another last state."""

    def run(name, ids=range(kill9.ROWS), loss="00", digest="a"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "output").touch()
        (folder / "digest").write_text(digest)
        ids = list(ids)
        lines = [
            json.dumps({"step": i + 1, "ids": ids[16 * i : 16 * i + 16], "loss": loss})
            for i in range(4)
        ]
        (folder / "steps.jsonl").write_text("\n".join(lines + ['{"step": 5, "id']))
        return folder

    calm = run("calm")
    kill9.compare(calm, run("same"))
    with pytest.raises(SystemExit, match="step 1 was"):
        kill9.compare(calm, run("loss", loss="01"))
    with pytest.raises(SystemExit, match="the last states differ"):
        kill9.compare(calm, run("state", digest="b"))
    twice = [0, *range(kill9.ROWS - 1)]
    with pytest.raises(SystemExit, match="every row once"):
        kill9.compare(run("calm twice", ids=twice), run("twice", ids=twice))
