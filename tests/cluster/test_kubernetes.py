"""kubernetes.yaml against the schemas of Kubernetes; it is not run on a cluster.

Its variables are: they connect two processes here.
"""

# pyright: reportMissingImports=false

import copy
import sys

import portpicker
import pytest
import yaml
from cluster.launches import TRAIN, Launch

from lockstep.distributed.line import EXIT_OTHER_FAILED
from lockstep.preemption import EXIT_CODE

pytestmark = pytest.mark.cluster

SERVICE, JOB = yaml.safe_load_all(TRAIN.with_name("kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
VARIABLES = {e["name"]: e["value"] for e in CONTAINER["env"] if "value" in e}


@pytest.fixture
def schemas():
    """Imported here: the other tests are collected where it is not installed."""
    import kubernetes_validate

    return kubernetes_validate


@pytest.mark.parametrize("version", ["1.29", "1.34"])
@pytest.mark.parametrize("document", [SERVICE, JOB], ids=lambda d: d["kind"])
def test_fits_the_schema(schemas, document, version):
    schemas.validate(document, version, strict=True)


def test_the_schema_refuses_a_name_that_it_does_not_know(schemas):
    wrong = copy.deepcopy(JOB)
    wrong["spec"]["template"]["spec"]["containers"][0]["enviroment"] = []
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, "1.34", strict=True)


def test_all_pods_are_there_at_the_same_time():
    count = JOB["spec"]["completions"]
    assert JOB["spec"]["parallelism"] == count
    assert VARIABLES["LOCKSTEP_NUM_PROCESSES"] == str(count)
    assert JOB["spec"]["completionMode"] == "Indexed"


def test_the_first_pod_has_the_name_that_the_others_look_for():
    job, service = JOB["metadata"]["name"], SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": job}
    assert POD["subdomain"] == service
    host = f"{job}-0.{service}.$(NAMESPACE).svc.cluster.local"
    assert VARIABLES["LOCKSTEP_COORDINATOR"].rpartition(":")[0] == host


def test_ends_for_another_reason_than_a_failure_do_not_count():
    first = JOB["spec"]["podFailurePolicy"]["rules"][0]
    assert first["action"] == "Ignore"
    assert first["onExitCodes"]["values"] == sorted([EXIT_OTHER_FAILED, EXIT_CODE])
    assert first["onExitCodes"]["containerName"] == CONTAINER["name"]


def test_the_variables_of_the_manifest_connect_the_processes(tmp_path, assert_as_alone):
    """As the pods are started, but for the name of the first one, which is ours."""
    _, script, *options = CONTAINER["command"]
    assert (script, options[0]) == (TRAIN.name, "--run")
    address = f"127.0.0.1:{portpicker.pick_unused_port()}"
    variables = VARIABLES | {"LOCKSTEP_COORDINATOR": address}
    command = [sys.executable, TRAIN, "--run", tmp_path]
    with (
        Launch(*command, **variables, JOB_COMPLETION_INDEX="0") as first,
        Launch(*command, **variables, JOB_COMPLETION_INDEX="1") as second,
    ):
        assert first.finish() == 0, first.text
        assert second.finish() == 0, second.text
    assert "2 processes (Kubernetes), 2 devices of kind cpu" in first.text
    assert_as_alone(first.text)
