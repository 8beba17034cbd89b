"""kubernetes.yaml and jobset.yaml against the schemas; they are not run on a cluster.

Their variables are: they connect two processes here.
"""

# pyright: reportMissingImports=false

import copy
import sys
from typing import Any

import portpicker
import pytest
import yaml
from cluster.launches import TRAIN, Launch

from lockstep.distributed.line import EXIT_OTHER_FAILED
from lockstep.preemption import EXIT_CODE

pytestmark = pytest.mark.cluster


def manifest(name: str) -> list[Any]:
    return list(yaml.safe_load_all(TRAIN.with_name(name).read_text()))


SERVICE, JOB = manifest("kubernetes.yaml")
[JOBSET] = manifest("jobset.yaml")
[MEMBER] = JOBSET["spec"]["replicatedJobs"]
# JobSet calls the Job by its own name, the member's, and the number of the Job.
JOB_IN_SET = MEMBER["template"] | {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": f"{JOBSET['metadata']['name']}-{MEMBER['name']}-0"},
}
of_both = pytest.mark.parametrize("job", [JOB, JOB_IN_SET], ids=["Job", "JobSet"])


def container(job) -> dict[str, Any]:
    [found] = job["spec"]["template"]["spec"]["containers"]
    return found


def variables(job) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container(job)["env"] if "value" in e}


@pytest.fixture
def schemas():
    """Imported here: the other tests are collected where it is not installed."""
    import kubernetes_validate

    return kubernetes_validate


@pytest.mark.parametrize("version", ["1.29", "1.34"])
@pytest.mark.parametrize(
    "document", [SERVICE, JOB, JOB_IN_SET], ids=["Service", "Job", "Job of the JobSet"]
)
def test_fits_the_schema(schemas, document, version):
    schemas.validate(document, version, strict=True)


def test_the_schema_refuses_a_name_that_it_does_not_know(schemas):
    wrong = copy.deepcopy(JOB)
    container(wrong)["enviroment"] = []
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, "1.34", strict=True)


def only(**properties) -> dict[str, Any]:
    """An object that has all of these fields, and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def list_of(items) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


# By hand, of the fields that the manifest has, from the custom resource definition and
# the webhook of JobSet 0.13: no package to install brings them.
TEXT = {"type": "string"}
JOBSET_SCHEMA = only(
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=only(name=TEXT),
    spec=only(
        failurePolicy=only(
            maxRestarts={"type": "integer"},
            rules=list_of(
                only(
                    name={"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action={
                        "enum": [
                            "FailJobSet",
                            "RestartJobSet",
                            "RestartJobSetAndIgnoreMaxRestarts",
                        ]
                    },
                    onJobFailureReasons=list_of(
                        {"enum": ["BackoffLimitExceeded", "PodFailurePolicy"]}
                    ),
                )
            ),
        ),
        replicatedJobs=list_of(only(name=TEXT, template=only(spec={}))),
    ),
)


def test_the_set_around_the_job_has_the_fields_of_a_jobset():
    from jsonschema import ValidationError, validate

    validate(JOBSET, JOBSET_SCHEMA)
    wrong = copy.deepcopy(JOBSET)
    wrong["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    with pytest.raises(ValidationError):
        validate(wrong, JOBSET_SCHEMA)


@of_both
def test_all_pods_are_there_at_the_same_time(job):
    count = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == count
    assert variables(job)["LOCKSTEP_NUM_PROCESSES"] == str(count)
    assert job["spec"]["completionMode"] == "Indexed"


@of_both
def test_the_first_pod_has_the_name_that_the_others_look_for(job):
    service = (SERVICE if job is JOB else JOBSET)["metadata"]["name"]
    host = f"{job['metadata']['name']}-0.{service}.$(NAMESPACE).svc.cluster.local"
    assert variables(job)["LOCKSTEP_COORDINATOR"].rpartition(":")[0] == host


def test_the_service_is_that_of_the_pods():
    """JobSet makes its own."""
    job = JOB["metadata"]["name"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": job}
    subdomain = JOB["spec"]["template"]["spec"]["subdomain"]
    assert subdomain == SERVICE["metadata"]["name"]


def actions(job) -> dict[int | str, str]:
    """What is done about a pod, by its exit code or its condition."""
    found = {}
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": []})
        assert codes.get("containerName", "train") == container(job)["name"]
        found |= dict.fromkeys(codes["values"], rule["action"])
        conditions = [c["type"] for c in rule.get("onPodConditions", [])]
        found |= dict.fromkeys(conditions, rule["action"])
    return found


def test_ends_for_another_reason_than_a_failure_do_not_count():
    alone = actions(JOB)
    assert alone == dict.fromkeys(
        [EXIT_OTHER_FAILED, EXIT_CODE, "DisruptionTarget"], "Ignore"
    )
    # The set starts again, without counting, when its Job fails by this policy.
    assert actions(JOB_IN_SET) == {
        EXIT_OTHER_FAILED: "Ignore",
        EXIT_CODE: "FailJob",
        "DisruptionTarget": "FailJob",
    }
    assert JOB_IN_SET["spec"]["backoffLimit"] == 0
    [rule] = JOBSET["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"


@of_both
def test_the_variables_of_the_manifest_connect_the_processes(
    job, tmp_path, assert_as_alone
):
    """As the pods are started, but for the name of the first one, which is ours."""
    _, script, *options = container(job)["command"]
    assert (script, options[0]) == (TRAIN.name, "--run")
    address = f"127.0.0.1:{portpicker.pick_unused_port()}"
    given = variables(job) | {"LOCKSTEP_COORDINATOR": address}
    command = [sys.executable, TRAIN, "--run", tmp_path]
    with (
        Launch(*command, **given, JOB_COMPLETION_INDEX="0") as first,
        Launch(*command, **given, JOB_COMPLETION_INDEX="1") as second,
    ):
        assert first.finish() == 0, first.text
        assert second.finish() == 0, second.text
    assert "2 processes (Kubernetes), 2 devices of kind cpu" in first.text
    assert_as_alone(first.text)
