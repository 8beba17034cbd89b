"""The report as text and as a table."""

from lockstep.debug.comparing.comparison import Comparison, Row


def test_a_short_report_in_the_order_of_the_outputs():
    report = Comparison(
        (1, 4),
        (Row("a", "equal", 0.0), Row("b", "rounding", 2e-7), Row("c", "equal", 0.0)),
    )
    assert report.same
    assert str(report) == (
        "output  verdict   difference\n"
        "a       equal\n"
        "b       rounding  2.0e-07\n"
        "c       equal\n"
        "same: 1 and 4 devices give the same; differences up to 2.0e-07 are rounding"
    )


def test_a_long_report_begins_with_the_worst():
    rows = [Row(f"leaf {i}", "equal", 0.0) for i in range(50)]
    rows += [Row("small", "wrong", 0.1), Row("large", "wrong", 3.0, "4.00 x")]
    report = Comparison((1, 4), tuple(rows), causes=("a cause " * 20,))
    lines = str(report).splitlines()
    assert not report.same
    assert lines[1].split() == ["large", "wrong", "3.0e+00", "4.00", "x"]
    assert lines[2].startswith("small")
    assert "... and 22 more outputs" in lines
    assert "WRONG: 2 of 52 outputs differ between 1 and 4 devices" in lines
    assert lines[33].startswith("likely cause: a cause")
    assert max(map(len, lines)) <= 88


def test_verdicts_that_need_words_are_explained_once():
    rows = (Row("a", "no signal", 1.0), Row("b", "no signal", 1.0))
    text = str(Comparison((1, 2), rows, notes=("a note",), advice="what to show"))
    assert text.count("rounding alone moves it") == 1
    assert "a note" in text and text.endswith("what to show")


def test_a_notebook_shows_a_table():
    html = Comparison((1, 4), (Row("a<b", "wrong", 1.0),))._repr_html_()
    assert "<td>a&lt;b</td><td>wrong</td>" in html and "WRONG: 1 of 1" in html
