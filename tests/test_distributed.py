from lockstep import distributed


def test_one_process_is_the_main_one():
    assert distributed.is_main_process() is True


def test_another_process_is_not(monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert distributed.is_main_process() is False


def test_processes_of_one_process():
    found = distributed.processes()
    assert found == distributed.Processes(0, 1, local_devices=8, devices=8)
    assert str(found) == "process 0 of 1"
