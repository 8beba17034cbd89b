import dataclasses
import io

from rich.console import Console

from lockstep.devices.report import DeviceReport

INSTALL = 'install "jax[cuda13]" & <restart>'

SIMULATED = DeviceReport(
    backend="cpu",
    total_devices=8,
    local_devices=8,
    kinds={"cpu": 8},
    memory_bytes=(None,) * 8,
    process_index=0,
    process_count=1,
    versions={"python": "3.13.0", "jax": "0.12.0"},
    advice=(INSTALL, "another advice"),
)
CLUSTER = DeviceReport(
    backend="gpu",
    total_devices=4,
    local_devices=2,
    kinds={"NVIDIA H200": 3, "NVIDIA H100": 1},
    memory_bytes=(3 * 2**30, 3 * 2**30),
    process_index=1,
    process_count=2,
    versions={"jax": "0.12.0"},
)


def test_plain_text():
    assert str(SIMULATED).splitlines() == [
        "backend   cpu",
        "devices   8 x cpu (simulated)",
        "memory    not reported",
        "process   0 of 1",
        "versions  python 3.13.0, jax 0.12.0",
        f"advice    {INSTALL}",
        "advice    another advice",
    ]


def test_plain_text_of_a_cluster():
    assert str(CLUSTER).splitlines() == [
        "backend   gpu",
        "devices   3 x NVIDIA H200, 1 x NVIDIA H100, 2 of them local",
        "memory    3.0 GiB a device",
        "process   1 of 2",
        "versions  jax 0.12.0",
    ]


def test_unequal_memory_is_listed():
    report = dataclasses.replace(CLUSTER, memory_bytes=(2**30, 2**31))
    assert "memory    1.0 GiB, 2.0 GiB" in str(report)


def test_no_device_at_all():
    report = dataclasses.replace(
        CLUSTER, backend="none", total_devices=0, local_devices=0, kinds={}
    )
    assert "devices   none\n" in str(report)


def test_rich_keeps_every_word_of_the_text():
    screen = io.StringIO()
    Console(file=screen, width=200).print(SIMULATED)
    shown = [line.split() for line in screen.getvalue().splitlines()]
    assert shown == [line.split() for line in str(SIMULATED).splitlines()]


def test_a_notebook_gets_an_escaped_table():
    page = SIMULATED._repr_html_()
    assert page.startswith("<table>") and page.endswith("</table>")
    assert "install &quot;jax[cuda13]&quot; &amp; &lt;restart&gt;" in page
    assert page.count("<tr>") == len(str(SIMULATED).splitlines())
