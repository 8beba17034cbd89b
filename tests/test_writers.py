"""Each writer keeps what it was given, whatever stops the run."""

import builtins
import importlib
import json
import math

import pytest

from lockstep.writers import Console, JsonLines, TensorBoard, Writer, in_words


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_console_prints_one_line_a_step(capsys):
    Console().write(1200, {"loss": 0.123456, "examples_per_second": 98765.4})
    assert capsys.readouterr().out == (
        "step 1200: loss 0.1235, examples_per_second 98,765\n"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2, "2"), (1234.5, "1,234"), (-1e6, "-1,000,000"), (1e-7, "1e-07"),
     (1e20, "1e+20"), (math.nan, "nan"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert in_words({"x": value}) == f"x {text}"


def test_json_lines_are_on_disk_at_once_in_folders_that_are_made(tmp_path):
    path = tmp_path / "run" / "deep" / "metrics.jsonl"
    writer = JsonLines(path)
    assert not path.parent.exists()
    writer.write(1, {"loss": 0.5})
    writer.write(2, {"loss": 0.25, "valid/accuracy": 1})
    assert lines_of(path) == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.25, "valid/accuracy": 1.0},
    ]
    writer.close()


def test_json_lines_keep_numbers_that_are_not_finite(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonLines(path)
    writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    writer.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    (line,) = path.read_text().splitlines()
    read = json.loads(line, parse_constant=refuse)
    assert math.isnan(float(read["a"]))
    assert (float(read["b"]), float(read["c"])) == (math.inf, -math.inf)


def test_json_lines_are_appended_by_a_second_run_and_after_close(tmp_path):
    path = tmp_path / "m.jsonl"
    for step in (1, 2):
        writer = JsonLines(path)
        writer.write(step, {"loss": 1.0})
        writer.close()
        writer.close()
    writer.write(3, {"loss": 1.0})
    writer.close()
    assert [line["step"] for line in lines_of(path)] == [1, 2, 3]


def test_a_line_that_a_killed_run_cut_off_spoils_no_other(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    writer = JsonLines(path)
    writer.write(2, {"loss": 1.0})
    writer.close()
    first, broken, last = path.read_text().splitlines()
    assert (json.loads(first)["step"], json.loads(last)["step"]) == (1, 2)
    assert broken == '{"step": 2, "lo'


def test_a_folder_in_place_of_the_file_is_named(tmp_path):
    with pytest.raises(IsADirectoryError, match="folder.*metrics.jsonl"):
        JsonLines(tmp_path).open()


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="JsonLines.*m.jsonl.*cannot be written"):
        JsonLines(tmp_path / "file" / "m.jsonl").open()
    with pytest.raises(OSError, match="TensorBoard.*cannot be written"):
        TensorBoard(tmp_path / "file" / "events").open()


def test_a_value_that_is_no_number_is_refused(tmp_path):
    writer = JsonLines(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="could not convert"):
        writer.write(1, {"loss": "low"})  # pyright: ignore[reportArgumentType]
    writer.close()


def test_tensorboard_holds_the_curves(tmp_path):
    writer = TensorBoard(tmp_path / "events")
    for step, loss in ((1, 0.5), (2, 0.25)):
        writer.write(step, {"loss": loss, "valid/accuracy": 1.0})
    writer.close()
    assert curves_of(tmp_path / "events") == {
        "loss": [(1, 0.5), (2, 0.25)],
        "valid/accuracy": [(1, 1.0), (2, 1.0)],
    }


def curves_of(folder):
    """Reads the events back: length, its checksum, the event, its checksum."""
    Event = importlib.import_module("tensorboardX.proto.event_pb2").Event
    curves = {}
    (file,) = folder.iterdir()
    data, at = file.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        at += 12 + size + 4
        for value in event.summary.value:
            curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


def test_without_tensorboardx_the_message_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tensorboardX":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'lockstep-jax\[tensorboard\]'"):
        TensorBoard(tmp_path).open()


def test_every_writer_fits_the_protocol(tmp_path):
    for writer in (Console(), JsonLines(tmp_path / "m"), TensorBoard(tmp_path)):
        assert isinstance(writer, Writer)
