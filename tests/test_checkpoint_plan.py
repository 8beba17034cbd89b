"""The plan for other devices, by hand; and what the commands print of a folder."""

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import lockstep as ls
from lockstep.checkpoint.plan import Plan, replan
from lockstep.cli import app


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


class TestKeepTheGlobalBatch:
    """64 rows on 8 devices, 8 at a time."""

    OLD = Plan(devices=8, rows=64, step=10, total=50)

    @pytest.mark.parametrize(
        ("devices", "accumulate", "each"), [(4, 2, 16), (2, 4, 32), (1, 8, 64)]
    )
    def test_with_more_microbatches_on_fewer_devices(self, devices, accumulate, each):
        change = replan(self.OLD, devices)
        assert (change.new.rows, change.new.accumulate) == (64, accumulate)
        assert change.new.microbatch == 8
        assert str(change.new).endswith(f"x {each} rows")
        assert (change.scale, change.new.total) == (1, 50)

    def test_with_fewer_microbatches_on_more_devices(self):
        change = replan(Plan(devices=2, rows=64, accumulate=4), 16)
        assert (change.new.accumulate, change.new.microbatch) == (1, 4)

    def test_with_a_microbatch_no_larger_than_before(self):
        """12 rows a device at a time; on 3 devices 40 rows make 4 x 10, not 3 x 13."""
        change = replan(Plan(devices=10, rows=120), 3)
        assert (change.new.accumulate, change.new.microbatch) == (4, 10)

    def test_is_refused_where_it_does_not_divide(self):
        with pytest.raises(
            ValueError, match="64 rows does not divide over 3 devices: use"
        ):
            replan(self.OLD, 3)

    def test_prints_what_stays(self):
        text = replan(self.OLD, 2).describe(learning_rate=0.1, warmup_steps=500)
        assert text.splitlines() == [
            "policy         keep-global-batch",
            "batch          global 64 = 2 devices x 32 rows "
            "(was global 64 = 8 devices x 8 rows)",
            "accumulate     4 x 8 rows a device (was 1 x 8)",
            "steps left     40 of 50",
            "learning rate  0.1, unchanged",
            "warm-up        500 steps, unchanged",
        ]


class TestLinearScaling:
    """Goyal et al. 2017: k times the rows, k times the learning rate."""

    OLD = Plan(devices=4, rows=256, step=100, total=500, epoch_rows=10_240)

    def test_keeps_the_rows_of_a_device(self):
        change = replan(self.OLD, 8, "linear-scaling")
        assert (change.new.rows, change.scale) == (512, 2.0)
        assert change.new.total == 300  # 400 steps of 256 rows are 200 of 512

    def test_never_leaves_rows_out(self):
        change = replan(Plan(devices=2, rows=8, step=0, total=5), 3, "linear-scaling")
        assert (change.new.rows, change.new.total) == (12, 4)  # 40 rows: 12 12 12 4

    def test_prints_what_becomes_of_rate_and_warm_up(self):
        text = replan(self.OLD, 8, "linear-scaling").describe(0.1, 50)
        assert "learning rate  x 2: 0.1 -> 0.2" in text
        assert "50 -> 25 steps, as many rows" in text
        assert "over 5 epochs (100 steps)" in text
        assert "steps left     200 of 300" in text

    def test_is_refused_where_rows_are_no_whole_number(self):
        with pytest.raises(ValueError, match="no whole number of rows a device"):
            replan(Plan(devices=3, rows=64), 2, "linear-scaling")


class TestFixedShards:
    OLD = Plan(devices=8, rows=64, fixed_shards=8)

    def test_go_on_with_the_same_batch_on_a_divisor(self):
        assert replan(self.OLD, 2).new.rows == 64
        with pytest.raises(ValueError, match="batch on 1, 2, 4, 8 devices"):
            replan(self.OLD, 16)
        with pytest.raises(ValueError, match="batch on 1, 2, 4, 8 devices"):
            replan(self.OLD, 4, "linear-scaling")


def test_an_unknown_policy_and_no_device_are_refused():
    with pytest.raises(ValueError, match="policy='double' is not one of"):
        replan(Plan(8, 64), 4, "double")
    with pytest.raises(ValueError, match="devices=0"):
        replan(Plan(8, 64), 0)


@pytest.fixture
def run(tmp_path, mesh_of):
    """The checkpoints of 5 steps of 16 rows on 8 devices."""
    data = ls.data.batches(np.ones((48, 2), np.float32), global_batch_size=16)
    trainer = ls.Trainer(
        lambda w, x: (w + x.mean(), {}),
        mesh=mesh_of(8),
        checkpoints=ls.Checkpointer(tmp_path, every=2, keep=2),
    )
    trainer.fit(0.0, data, steps=5)
    return tmp_path


class TestTheCommands:
    def test_list_steps_sizes_and_damage(self, run):
        (run / "4" / "state" / "_METADATA").unlink()
        (run / "6.orbax-checkpoint-tmp").mkdir()
        result = invoke("checkpoints", run)
        assert result.exit_code == 0
        titles, four, five, six = result.output.splitlines()
        assert titles.split() == ["step", "size", "saved", "devices", "batch", "state"]
        assert four.endswith("damaged: state/_METADATA is missing")
        assert five.split()[0] == "5" and five.endswith("8        16     complete")
        assert six.startswith("6.orbax-checkpoint-tmp") and "not a checkpoint" in six

    def test_list_nothing(self, tmp_path):
        for directory in (tmp_path, tmp_path / "missing"):
            result = invoke("checkpoints", directory)
            assert result.exit_code == 1
            assert "holds no checkpoint" in result.output

    def test_print_a_plan(self, run):
        result = invoke("plan", run, "--devices", 4)
        assert result.exit_code == 0
        assert result.output.startswith(f"checkpoint     {run}/5\n")
        assert "global 16 = 4 devices x 4 rows" in result.output
        assert "steps left     0 of 5" in result.output

    def test_refuse_what_no_plan_holds(self, run, tmp_path):
        result = invoke("plan", run, "--devices", 3)
        assert result.exit_code == 1
        assert "does not divide over 3 devices" in result.output
        result = invoke("plan", run, "--devices", 4, "--step", 3)
        assert (result.exit_code, "it has 4, 5" in result.output) == (2, True)

    def test_need_the_batches_of_a_run(self, tmp_path):
        checkpoints = ls.Checkpointer(tmp_path)
        checkpoints.save(1, {"w": jnp.ones(2)})
        checkpoints.wait()
        result = invoke("plan", tmp_path, "--devices", 4)
        assert (result.exit_code, "outside of a Trainer" in result.output) == (2, True)
        assert "complete" in invoke("checkpoints", tmp_path).output
