"""The files for GPU hosts and clusters: held against the schemas of those who read them."""

import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nothing here starts Ray

import msgspec
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from actors.lifecycle.deployment import worker_bundle, worker_names
from configs.load import BUILD_ARGUMENTS, PROJECT_ROOT, load_config

CONFIGS = PROJECT_ROOT / "configs"
CLUSTER = CONFIGS / "cluster"
MODE = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_MAXCONN": "12000",
}
HAPROXY = "RAY_SERVE_HAPROXY_BINARY_PATH"  # the one whose ports are closed
HAPROXY_PORTS = {8404, 9101}
PRIVATE_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # what Kubernetes calls a DNS label


def read(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((CLUSTER / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("gpu_pd", {"prefill": 1, "decode": 1}),
        ("h200_1p1d", {"prefill": 1, "decode": 1}),
        ("h200_2p2d", {"prefill": 2, "decode": 2}),
        ("h200_unified_x4", {"unified": 4}),
    ],
)
def test_a_file_for_several_gpus_gives_each_worker_one(name: str, roles: dict[str, int]) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", {})
    workers = worker_names(config, "0")
    assert {role: list(workers.values()).count(role) for role in workers.values()} == roles  # type: ignore[comparison-overlap]
    assert worker_bundle(config) == {"CPU": 1.0, "GPU": 1.0}
    assert config.model.device == "cuda"
    assert config.handoff.channel == "auto"
    assert config.handoff.address is None, "workers of several nodes could not meet"


def test_four_unified_workers_schedule_as_one_does() -> None:
    one = load_config(CONFIGS / "h200_1_laps.yaml", {})
    four = load_config(CONFIGS / "h200_unified_x4.yaml", {})
    assert (four.laps, four.scheduler, four.cache) == (one.laps, one.scheduler, one.cache)


@pytest.mark.parametrize("name", ["h200_unified_x4", "h200_2p2d"])
def test_several_workers_may_have_a_longer_queue_than_one(name: str) -> None:
    assert load_config(CONFIGS / f"{name}.yaml", {}).edge.max_queued_tokens == "auto"


def test_the_files_for_any_gpu_choose_the_same_and_schedule_by_length() -> None:
    one = load_config(CONFIGS / "gpu.yaml", {})
    two = load_config(CONFIGS / "gpu_pd.yaml", {})
    assert (one.laps, one.scheduler, one.cache) == (two.laps, two.scheduler, two.cache)
    assert (one.laps.queue, one.laps.mix) == ("laps", "fill")
    assert one.edge.max_queued_tokens == two.edge.max_queued_tokens == "auto"
    left = [
        value
        for section in (one.laps, one.scheduler)
        for value in msgspec.structs.asdict(section).values()
    ]
    assert left.count("auto") == 6


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_cpu.yaml")), ids=str)
def test_workers_without_a_gpu_ask_for_nothing_so_that_two_cores_are_enough(path: Path) -> None:
    assert worker_bundle(load_config(path, {})) == {}


def serve_configs() -> dict[str, dict[str, Any]]:
    service = read("rayservice.yaml")["spec"]["serveConfigV2"]
    return {"serve.yaml": read("serve.yaml"), "rayservice.yaml": yaml.safe_load(service)}


@pytest.mark.parametrize("source", ["serve.yaml", "rayservice.yaml"])
def test_serve_takes_the_application_and_it_names_what_exists(source: str) -> None:
    plain = serve_configs()[source]
    schema = ServeDeploySchema.model_validate(plain)
    [application] = schema.applications
    assert application.import_path == "serve_app:build"
    assert set(application.args) == set(BUILD_ARGUMENTS) - {"host", "port"}  # http_options
    load_config(PROJECT_ROOT / application.args["config"], {})
    assert Path(application.args["model"]).is_absolute()
    assert set(plain["http_options"]) <= set(schema.http_options.model_dump())
    assert plain["http_options"]["host"] == "0.0.0.0", "HAProxy of other nodes asks replicas here"
    assert schema.http_options.request_timeout_s is None, "it would cut streams in the middle"


def test_both_files_for_serve_say_the_same() -> None:
    by_hand, by_kuberay = serve_configs().values()
    assert by_hand == by_kuberay


def test_the_cluster_file_is_what_ray_up_takes() -> None:
    prepared = prepare_config(read("ray_cluster.yaml"))
    validate_config(prepared)
    [node_type] = prepared["available_node_types"]
    assert prepared["head_node_type"] == node_type
    workers = prepared["provider"]["worker_ips"]
    assert prepared["max_workers"] == len(workers)


def test_ray_refuses_a_cluster_file_with_a_key_it_does_not_know() -> None:
    with pytest.raises(Exception, match="dashboards"):
        validate_config(prepare_config(read("ray_cluster.yaml") | {"dashboards": 1}))


def test_every_node_of_the_cluster_file_starts_with_a_token_and_the_same_mode() -> None:
    plain = read("ray_cluster.yaml")
    token = "~/.ray/auth_token"
    assert plain["file_mounts"][token] == token
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in plain[key]
        if "ray start" in command
    ]
    assert len(starts) == 2
    for command in starts:
        variables = dict(word.split("=", 1) for word in command.split() if word.startswith("RAY_"))
        haproxy = {HAPROXY: "$HOME/laps-venv/bin/laps-haproxy"}
        assert variables.pop("RAY_enable_autoscaler_v2", "0") == "0"  # of the head
        assert variables == MODE | haproxy | {"RAY_AUTH_MODE": "token"}
    assert "--dashboard-host=127.0.0.1" in starts[0]


@pytest.mark.parametrize("name", ["ray_cluster.yaml", "rayservice.yaml"])
def test_the_ports_that_haproxy_opens_are_named(name: str) -> None:
    text = (CLUSTER / name).read_text()
    assert HAPROXY_PORTS | {30000, 31000} <= {int(n) for n in re.findall(r"\b\d{4,5}\b", text)}


def pods() -> dict[str, dict[str, Any]]:
    """Group -> its pod, of the RayService."""
    cluster = read("rayservice.yaml")["spec"]["rayClusterConfig"]
    workers = {g["groupName"]: g["template"]["spec"] for g in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"]["spec"]} | workers


def test_the_ray_service_is_one_with_a_token() -> None:
    service = read("rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert PRIVATE_NAME.fullmatch(service["metadata"]["name"])
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in cluster["workerGroupSpecs"]:
        assert PRIVATE_NAME.fullmatch(group["groupName"])
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize("group", ["head", "gpu"])
def test_a_pod_of_the_ray_service_is_complete_and_has_few_rights(group: str) -> None:
    pod = pods()[group]
    [container] = pod["containers"]
    assert container["image"] == "REGISTRY/laps-engine:TAG", "a placeholder that no one can pull"
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    drain_s = float(variables.pop("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"))
    assert drain_s < pods()["gpu"]["terminationGracePeriodSeconds"], "it would be cut short"
    assert variables == MODE | {HAPROXY: "/usr/local/bin/laps-haproxy"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    [model] = [m for m in container["volumeMounts"] if m["name"] == "models"]
    config = serve_configs()["rayservice.yaml"]
    assert config["applications"][0]["args"]["model"].startswith(model["mountPath"] + "/")
    names = [port["name"] for port in container["ports"]]
    assert len(set(names)) == len(names)


def test_the_gpu_pods_have_devices_for_every_worker_and_answer_probes() -> None:
    cluster = read("rayservice.yaml")["spec"]["rayClusterConfig"]
    [group] = cluster["workerGroupSpecs"]
    [container] = pods()["gpu"]["containers"]
    args = serve_configs()["rayservice.yaml"]["applications"][0]["args"]
    workers = load_config(PROJECT_ROOT / args["config"], {}).workers
    num_workers = workers.prefill + workers.decode + workers.unified
    limits = container["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) * group["replicas"] == num_workers * workers.num_gpus
    assert int(limits["cpu"]) * group["replicas"] > num_workers * workers.num_cpus
    probe = container["readinessProbe"]["httpGet"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert probe["path"] == "/health"
    assert ports[probe["port"]] == serve_configs()["rayservice.yaml"]["http_options"]["port"]
