"""`lockstep scale`: formulas by hand, and what others have measured and published."""

import jax
import pytest
from bench_maker import write_maker
from fresh_process import run_lockstep

import lockstep as ls
from lockstep.scale import (
    PRESETS,
    Link,
    Network,
    Training,
    all_reduce_s,
    link,
    predict,
    report,
)
from lockstep.scale.network import _gbit

PLAIN = Network(4, Link(1e-6, 1e9), Link(1e-5, 1e8), "by hand")


class TestAllReduce:
    def test_inside_one_host(self):
        # 3 steps each way, a quarter of the bytes each.
        assert all_reduce_s(4000, 4, PLAIN) == pytest.approx(2 * 3 * (1e-6 + 1e-6))

    def test_ring_between_hosts(self):
        inside = 2 * 3 * (1e-6 + 1e-6)
        between = 2 * 1 * (1e-5 + 2000 / 1e8)
        assert all_reduce_s(4000, 8, PLAIN) == pytest.approx(inside + between)

    def test_tree_has_fewer_steps_and_more_bytes(self):
        inside = 2 * 3 * (1e-6 + 1e-6)
        between = 2 * (4 * 1e-5 + 4000 / 1e8)
        found = all_reduce_s(4000, 64, PLAIN, "tree")
        assert found == pytest.approx(inside + between)
        assert found < all_reduce_s(4000, 64, PLAIN, "ring")

    def test_one_device_sends_nothing(self):
        assert all_reduce_s(4000, 1, PLAIN) == 0

    def test_refuses_a_part_of_a_host(self):
        with pytest.raises(ValueError, match="6 devices are no whole number of hosts"):
            all_reduce_s(4000, 6, PLAIN)


class TestPrediction:
    def test_packing_saves_latency(self):
        many = Training(0.001, 1e5, messages=200)
        one = Training(0.001, 1e5, messages=1)
        [slow], [fast] = (predict(t, PRESETS["h100-ndr"], [64]) for t in (many, one))
        assert slow.exposed_s > 20 * fast.exposed_s

    def test_what_is_hidden_costs_nothing(self):
        [row] = predict(Training(0.1, 1e9, hidden=1.0), PLAIN, [8])
        assert row.efficiency == 1 and row.step_s == 0.1

    def test_fsdp_sends_half_as_much_again(self):
        waits = {
            kind: predict(Training(0.1, 1e8, sharding=kind), PLAIN, [8])[0].exposed_s
            for kind in ("replicated", "zero1", "fsdp")
        }
        assert waits["zero1"] == waits["replicated"]
        assert waits["fsdp"] == pytest.approx(1.5 * waits["replicated"])

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ({"hidden": 1.5}, "hidden=1.5"),
            ({"compute_s": 0}, "compute_s=0"),
            ({"compute_s": float("nan")}, "compute_s=nan"),
            ({"nbytes": float("inf")}, "nbytes=inf"),
            ({"sharding": "zero3"}, "zero3"),
        ],
    )
    def test_refuses_wrong_numbers(self, wrong, words):
        with pytest.raises(ValueError, match=words):
            Training(**({"compute_s": 1, "nbytes": 1} | wrong))


class TestMeasuredLink:
    @pytest.mark.parametrize("devices", [2, 4, 8])
    def test_it_is_the_one_that_a_ring_would_have(self, devices):
        true = Link(5e-5, 2e9)
        times = [
            all_reduce_s(n, devices, Network(1, true, true, "")) for n in link.SIZES
        ]
        found = link.fit(link.SIZES, times, devices)
        assert found.latency_s == pytest.approx(true.latency_s)
        assert found.bandwidth == pytest.approx(true.bandwidth)

    def test_small_messages_count_as_much_as_large_ones(self):
        found = link.fit([8, 80, 1e7], [1e-4, 1e-4, 1e-1], devices=2)
        assert found.latency_s == pytest.approx(5e-5, rel=0.01)

    def test_noise_makes_no_link_that_takes_less_than_no_time(self):
        assert link.fit([1e3, 1e6], [2e-3, 1e-3], devices=2).seconds(1e9) > 0
        assert link.fit([1e3, 1e6], [1e-9, 1e-3], devices=2).latency_s == 0

    def test_larger_messages_take_longer(self):
        mesh = ls.make_mesh(devices=jax.devices()[:2])
        small, large = (link.all_reduce_s(mesh, n) for n in (4096, 2**22))
        assert 0 < small < large < 1

    def test_where_there_is_only_a_ring_no_tree_is_taken(self):
        only_ring = Network(1, PLAIN.between, PLAIN.between, "gloo", ("ring",))
        [ring] = predict(Training(0.1, 4000), only_ring, [64])
        assert ring.algorithm == "ring"
        assert ring.exposed_s == pytest.approx(2 * 63 * (1e-5 + 4000 / 64 / 1e8))


PUBLISHED = {
    # Goyal et al. 2017: ResNet-50, 25 million parameters, 8 P100 a host, one port of 50
    # Gbit/s; the backward pass of 32 images takes 120 ms, so a step about 180 ms; about
    # 90 % from 8 to 256 GPUs.
    "goyal": (0.180, 100e6, 8, 50, 256, 0.90),
    # Horovod's benchmark page: 128 hosts of 4 P100, RoCE of 25 Gbit/s, 64 images a GPU.
    # ResNet-101 runs at 104 images a second and GPU there; VGG-16 at 154 on a P100 in
    # the benchmarks of TensorFlow of that time.
    "resnet101": (64 / 104, 178e6, 4, 25, 512, 0.90),
    "vgg16": (64 / 154, 553e6, 4, 25, 512, 0.68),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_curves(name):
    """Half of the communication hidden: within 5 points of what was measured."""
    compute_s, nbytes, per_host, gbit, devices, measured = PUBLISHED[name]
    nvlink_or_pcie = Link(5e-6, 12e9)
    network = Network(per_host, nvlink_or_pcie, Link(30e-6, _gbit(gbit)), name)
    bounds = []
    for hidden in (0.0, 0.5, 1.0):
        training = Training(compute_s, nbytes, hidden=hidden)
        alone, many = predict(training, network, [per_host, devices])
        bounds.append(many.efficiency / alone.efficiency)
    assert bounds[0] < measured < bounds[2]
    assert bounds[1] == pytest.approx(measured, abs=0.05), bounds


class TestTheCommand:
    def test_by_numbers(self, tmp_path):
        picture = tmp_path / "scale.png"
        arguments = "--compute-ms 100 --gradient-mb 400 --network a100-hdr --plot"
        done = run_lockstep("scale", *arguments.split(), str(picture))
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[3].split() == ["1", "100.00", "0.0%", "100.0%", "none"]
        assert lines[-1].split()[0] == "16384" and lines[-1].split()[-1] == "tree"
        assert picture.read_bytes()[1:4] == b"PNG"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ("--network carrier-pigeon", "the presets are h100-ndr"),
            ("--network here", "one device has no link to measure"),
            ("--compute-ms 5", "both --compute-ms and --gradient-mb"),
        ],
    )
    def test_says_what_is_missing(self, arguments, words):
        done = run_lockstep("scale", *arguments.split())
        assert done.returncode == 2 and words in done.stderr

    def test_of_a_step(self, tmp_path):
        where = write_maker(tmp_path)
        done = run_lockstep("scale", where, JAX_NUM_CPU_DEVICES="2")
        assert done.returncode == 0, done.stderr
        # Three parameters, and the sums of the loss: 4 bytes each.
        assert "20 B all-reduced in 1 message" in done.stdout

    @pytest.mark.full
    def test_between_processes_one_of_them_prints(self):
        step = "--compute-ms 50 --gradient-mb 1 --network here --last 4"
        run = "run --processes 2 -m lockstep scale"
        done = run_lockstep(*run.split(), *step.split())
        assert done.returncode == 0, done.stderr
        assert "all-reduces over 2 devices (processes: 2)" in done.stdout
        rows = [line.split() for line in done.stdout.splitlines()[-3:]]
        assert [row[:2] for row in rows] == [["[0]", "1"], ["[0]", "2"], ["[0]", "4"]]
        assert rows[0][2] == "50.00" and float(rows[2][2]) > float(rows[1][2]) > 50


def test_counts_double():
    assert report.device_counts(1, 16_384)[-1] == 16_384
