"""What deploy/ ships fits the package, Kubernetes' schemas and itself. No image is built here and no cluster asked."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import orchestrator
from orchestrator.config import Config, load_config
from orchestrator.environments import pod_manifests
from orchestrator.hooks.tested_versions import COMPONENTS, MEGATRON_CORE, MOONCAKE, RAY, VLLM
from orchestrator.run_folder import RunFolder
from orchestrator.runtime import pool_requests
from orchestrator.runtime.changed_config import config_to_continue
from tests.support.waiting import free_port, wait_for
from vllm_rlplugin import options

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILES = sorted((DEPLOY / "containers").glob("Containerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))
SECRETS = re.compile(r"token|password|secret|credential", re.IGNORECASE)


# ----------------------------------------------------------------------------------------------------------- containers


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def listed(path: Path, name: str) -> list[str]:
    """The words of an instruction in its JSON form; the last one of that name counts."""
    found = [rest for instruction, rest in instructions(path) if instruction == name]
    words: list[str] = json.loads(found[-1]) if found else []
    return words


def copied(path: Path) -> set[str]:
    """Sources of COPY from the build context."""
    sources = [rest.split()[:-1] for name, rest in instructions(path) if name == "COPY" and "--from=" not in rest]
    return {source for words in sources for source in words}


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_exists_and_reaches_the_build(path: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = [line[1:] for line in lines if line.startswith("!")]
    for source in copied(path):
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in let_in), f"{source} is ignored"


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_an_image_that_builds_the_wheel_copies_all_that_it_is_built_from(path: Path) -> None:
    if not copied(path):
        assert path.name == "Containerfile.relay"
        return
    settings = PROJECT["tool"]["setuptools"]
    wanted = {"orchestrator", "vllm_rlplugin", "megatron_rlplugin", "csrc", "patches", "pyproject.toml", "setup.py"}
    wanted |= {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    wanted |= {pattern.split("/")[0] for patterns in settings["data-files"].values() for pattern in patterns}
    assert wanted <= copied(path)


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_special_says_its_health_and_holds_no_secret(path: Path) -> None:
    found = instructions(path)
    names = [name for name, _ in found]
    users = [rest for name, rest in found if name == "USER"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", users[-1]), (
        "the last USER is a number above 0, which runAsNonRoot can see"
    )
    assert "HEALTHCHECK" in names
    assert not {"ADD", "MAINTAINER"} & set(names)
    for name, rest in found:
        assert name not in ("ENV", "ARG") or not SECRETS.search(rest), rest
        if name == "FROM":
            assert not rest.endswith(":latest")
            assert ":" in rest or "${" in rest, f"{rest} names no version"
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_what_an_image_starts_exists(path: Path) -> None:
    words = [*listed(path, "ENTRYPOINT"), *listed(path, "CMD")]
    ours = set(PROJECT["project"]["scripts"])
    assert words[0] in {*ours, "vllm", "mooncake_master", "python"}
    if words[1:2] == ["-m"]:
        assert importlib.util.find_spec(words[2]) is not None


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_what_an_image_installs_is_a_tested_version_and_a_known_extra(path: Path) -> None:
    text = "\n".join(rest for name, rest in instructions(path) if name in ("RUN", "ARG"))
    lists = re.findall(r"(?:whl\)\[|EXTRAS=)([\w,-]+)", text)
    assert lists or path.suffix == ".relay"
    for extras in lists:
        assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    components = {name: component for component in COMPONENTS for name in component.distributions}
    pinned = [Requirement(word) for word in re.findall(r'(?<=["\s])([\w-]+[=<>]=[^"\s]+)', text)]
    for requirement in pinned:
        tested = [tried.version for tried in components[requirement.name].tried]
        assert any(version in requirement.specifier for version in tested), requirement
    for image in re.findall(r"vllm-openai:v([\d.]+)", text):
        assert image in VLLM.tested
    names = {components[requirement.name] for requirement in pinned}
    wanted = {
        "rollout": {MOONCAKE},
        "trainer": {VLLM, MEGATRON_CORE, MOONCAKE},
        "relay": {MOONCAKE},
        "environment": set(),
    }
    assert names == wanted[path.suffix[1:]]


def test_the_environments_image_starts_what_the_runs_pods_start() -> None:
    settings = pod_manifests.PodSettings(owner="o", image="i")
    command = pod_manifests.pod_manifest(settings, "n", "i", "0" * 64)["spec"]["containers"][0]["command"]
    (path,) = (path for path in CONTAINERFILES if path.suffix == ".environment")
    same = command[: command.index("--token-digest")]
    assert listed(path, "CMD") == same


@pytest.mark.engine
def test_the_relays_command_is_a_master_that_carries_an_object(tmp_path: Path) -> None:
    """The image's own command, with free ports, and a client in a process of its own."""
    (path,) = (path for path in CONTAINERFILES if path.suffix == ".relay")
    words = [*listed(path, "ENTRYPOINT"), *listed(path, "CMD")]
    ports = {"50051": free_port(), "9003": free_port()}
    command = [re.sub(r"(?<==)(50051|9003)$", lambda match: str(ports[match.group()]), word) for word in words]
    command[0] = str(Path(sys.executable).parent / command[0])
    client = (
        "import os, sys\n"
        "from orchestrator.transfer import RelayEndpoint, open_relay\n"
        "relay = open_relay(RelayEndpoint(job='deploy', master=sys.argv[1]), segment_bytes=16 << 20)\n"
        "relay.put('deploy/1', memoryview(b'1234')); buffer = bytearray(4)\n"
        "assert relay.get_into('deploy/1', memoryview(buffer)) == 4 and buffer == b'1234'\n"
        "relay.close()\n"
    )
    with (tmp_path / "log").open("wb") as log:
        master = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
    try:
        wait_for(lambda: listens(ports["50051"]) and listens(ports["9003"]), 30)
        done = subprocess.run(
            [sys.executable, "-c", client, f"127.0.0.1:{ports['50051']}"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr[-800:]
    finally:
        master.kill()
        master.wait()


# ----------------------------------------------------------------------------------------------------------- Kubernetes


def documents(name: str = "*.yaml") -> list[dict[str, Any]]:
    paths = [path for path in sorted((DEPLOY / "kubernetes").glob(name)) if path.name != "kustomization.yaml"]
    return [item for path in paths for item in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def kind(wanted: str) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in documents() if item["kind"] == wanted}


def pod_specs() -> dict[str, dict[str, Any]]:
    items = [item for item in documents() if item["kind"] in ("Deployment", "StatefulSet", "Job")]
    return {item["metadata"]["name"]: item["spec"]["template"]["spec"] for item in items}


@pytest.fixture(scope="module")
def run() -> Config:
    return load_config(DEPLOY / "kubernetes" / "run.toml")


@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_every_manifest_is_what_kubernetes_schemas_allow(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for item in documents():
        validator.validate(item, version, strict=True)
    broken = {
        **kind("Job")["rl-coserve-train"],
        "spec": {"template": {"spec": {"containers": [], "restartpolicy": "Never"}}},
    }
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


def test_kustomize_names_every_manifest_and_every_image_of_ours() -> None:
    page = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text(encoding="utf-8"))
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(page["resources"]) == files
    assert set(page) == {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "images"}
    assert page["namespace"] in kind("Namespace")
    images = {container["image"] for spec in pod_specs().values() for container in spec["containers"]}
    named = {image["name"]: image["newTag"] for image in page["images"]}
    assert {image for image in images if image.startswith("rl-coserve")} == set(named)
    assert set(named.values()) == {orchestrator.__version__}
    for generator in page["configMapGenerator"]:
        assert all((DEPLOY / "kubernetes" / name).is_file() for name in generator["files"])
    built = {f"rl-coserve-{path.suffix[1:]}" for path in CONTAINERFILES}
    assert set(named) <= built


def test_kustomize_itself_makes_valid_objects_of_the_folder() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", DEPLOY / "kubernetes"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    made = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(done.stdout)}
    assert len(made) == len(documents()) + 1
    (name,) = (name for kind, name in made if kind == "ConfigMap")
    text = (DEPLOY / "kubernetes" / "run.toml").read_text(encoding="utf-8")
    assert made["ConfigMap", name]["data"] == {"run.toml": text}
    volumes = made["Job", "rl-coserve-train"]["spec"]["template"]["spec"]["volumes"]
    assert name in [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    assert all(item["metadata"].get("namespace", "rl-coserve") == "rl-coserve" for item in made.values())
    validator = pytest.importorskip("kubernetes_validate")
    for item in made.values():
        validator.validate(item, "1.33", strict=True)


def test_no_pod_runs_as_root_or_may_become_it() -> None:
    for name, spec in pod_specs().items():
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] == (name == "rl-coserve-train")
        for container in spec["containers"]:
            context = container["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]})
            assert container["resources"]["limits"]["memory"]
            assert not [
                item for item in container.get("env", []) if SECRETS.search(item["name"]) and "FILE" not in item["name"]
            ]


def test_the_account_may_do_what_the_code_asks_for_and_no_more() -> None:
    source = (ROOT / "orchestrator" / "environments" / "pods.py").read_text(encoding="utf-8")
    (needed,) = re.findall(r'needed = "(.*)"', source)
    for role in kind("Role").values():
        for rule in role["rules"]:
            assert all(verb in needed for verb in rule["verbs"])
            assert all(resource in needed for resource in rule["resources"])
            assert set(rule["verbs"]) == {"create", "get", "list", "watch", "delete", "deletecollection"}
    assert not kind("ClusterRole")


def test_the_config_names_the_services_of_the_manifests(run: Config) -> None:
    services = kind("Service")
    rollout = kind("StatefulSet")["rl-coserve-rollout"]["spec"]
    port = services["rl-coserve-rollout"]["spec"]["ports"][0]["port"]
    name = rollout["serviceName"]
    assert list(run.rollout.served) == [
        f"http://rl-coserve-rollout-{i}.{name}:{port}" for i in range(rollout["replicas"])
    ]
    host, _, number = run.relay.master.partition(":")
    assert services[host]["spec"]["ports"][0]["port"] == int(number)
    host, _, number = run.relay.metadata_url.removeprefix("redis://").partition(":")
    assert services[host]["spec"]["ports"][0]["port"] == int(number)
    assert run.environment.kubernetes.namespace in kind("Namespace")
    assert run.environment.kubernetes.image == f"rl-coserve-environment:{orchestrator.__version__}"


def test_every_service_finds_a_pod_that_listens_where_it_says() -> None:
    labelled = [
        (item["spec"]["template"]["metadata"]["labels"], item["spec"]["template"]["spec"]["containers"][0])
        for item in documents()
        if item["kind"] in ("Deployment", "StatefulSet")
    ]
    for service in kind("Service").values():
        (container,) = (c for labels, c in labelled if service["spec"]["selector"].items() <= labels.items())
        listening = {port["name"]: port["containerPort"] for port in container["ports"]}
        for port in service["spec"]["ports"]:
            assert listening[port["targetPort"]] == port["port"]
        words = " ".join(container["args"])
        for number in listening.values():
            assert str(number) in words or number == 6379, "the program is not told to listen there"


def test_files_that_a_process_is_told_of_are_mounted_there(run: Config) -> None:
    mounts = {
        name: {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        for name, spec in pod_specs().items()
        if name != "rl-coserve-relay"
    }
    files = [run.model.path, run.rollout.served_token_file, run.relay.metadata_password_file, run.run.folder + "/x"]
    assert all(str(Path(file).parent) in mounts["rl-coserve-train"] for file in files)
    rollout = pod_specs()["rl-coserve-rollout"]["containers"][0]
    told = [word.partition("=")[2] for word in rollout["args"] if "token-file" in word]
    told += [rollout["args"][0], *(item["value"] for item in rollout["env"])]
    assert len(told) == 3
    assert all(str(Path(file).parent) in mounts["rl-coserve-rollout"] for file in told)
    for spec in pod_specs().values():
        volumes = {volume["name"] for volume in spec.get("volumes", [])} | {"data"}  # a claim of its own
        assert {mount["name"] for mount in spec["containers"][0].get("volumeMounts", [])} <= volumes


def test_the_flags_of_the_servers_are_the_plugins() -> None:
    arguments = pod_specs()["rl-coserve-rollout"]["containers"][0]["args"]
    scripts = (DEPLOY / "slurm" / "served.sbatch").read_text(encoding="utf-8")
    used = {word.partition("=")[0] for word in arguments if word.startswith("--rl-")} | set(
        re.findall(r"--rl-[\w-]+", scripts)
    )
    fields = {*options.PluginOptions.__dataclass_fields__, *options.FrontendOptions.__dataclass_fields__}
    assert used
    assert {flag.removeprefix("--rl-").replace("-", "_") for flag in used} <= fields


def test_environments_pods_fit_into_the_namespace_and_its_network_policy(run: Config) -> None:
    settings = pod_manifests.PodSettings(owner="run", image=run.environment.kubernetes.image)
    pod = pod_manifests.pod_manifest(settings, "environment-1", settings.image, "0" * 64)
    policy = kind("NetworkPolicy")["rl-coserve-environments"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["ingress"][0]["ports"] == [{"port": run.environment.kubernetes.port}]
    (allowed,) = policy["ingress"][0]["from"]
    labels = kind("Job")["rl-coserve-train"]["spec"]["template"]["metadata"]["labels"]
    assert allowed["podSelector"]["matchLabels"].items() <= labels.items()
    validator = pytest.importorskip("kubernetes_validate")
    for item in (
        pod,
        pod_manifests.pre_pull_manifest(settings, settings.image),
    ):
        validator.validate(item, "1.33", strict=True)


def test_the_metadata_servers_command_starts_a_redis_that_asks_for_the_secrets_password(tmp_path: Path) -> None:
    """The pod's own shell line, its folders elsewhere."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    redis = pytest.importorskip("redis", reason="the extra 'redis' is not installed")
    container = pod_specs()["rl-coserve-metadata"]["containers"][0]
    (tmp_path / "password").write_text("a-password-of-the-secret")
    port, line = free_port(), container["args"][0]
    for path, place in (("/secrets/metadata/", ""), ("/tmp/redis.conf", "redis.conf"), ("/data", "")):
        assert path in line
        line = line.replace(path, f"{tmp_path}/{place}")
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*container["command"], f"{line} --port {port}"], stdout=log, stderr=log)
    try:
        wait_for(lambda: listens(port), 20)
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis(port=port).ping()
        client = redis.Redis(port=port, password="a-password-of-the-secret")
        kept = {name: client.config_get(name)[name] for name in ("appendonly", "appendfsync", "maxmemory-policy")}
        assert kept == {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
        assert client.config_get("bind")["bind"] == "* -::*", "other pods do not reach it"
        assert stat.S_IMODE((tmp_path / "redis.conf").stat().st_mode) == 0o600
    finally:
        server.kill()
        server.wait()


# -------------------------------------------------------------------------------------------------------------- KubeRay


def test_a_ray_jobs_worker_groups_are_the_pools_of_its_run() -> None:
    folder = DEPLOY / "kuberay"
    job = yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8"))
    config = load_config(folder / "run.toml")
    cluster = job["spec"]["rayClusterSpec"]
    pools: Counter[str] = Counter()
    for group in cluster["workerGroupSpecs"]:
        given = group["rayStartParams"]
        ((hardware, count),) = json.loads(
            json.loads(given["resources"])
        ).items()  # in the quotes of a shell's command line
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert given["num-gpus"] == limits["nvidia.com/gpu"] == str(count)
        pools[hardware] += group["replicas"] * count
    assert pools == config.resources.pools
    pool_requests.check(config)
    wanted: Counter[str] = Counter()
    for _, hardware, devices in pool_requests.wishes(config):
        wanted[hardware] += devices
    assert wanted == pools
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-gpus": "0"}
    assert cluster["rayVersion"] in RAY.tested
    assert (config.ray.address, config.relay.host) == ("auto", "127.0.0.1")
    train = "rl-coserve train /etc/rl-coserve/run.toml relay.host=$(hostname -i | tr ' ' '\\n' | grep -m1 -F .)"
    assert job["spec"]["entrypoint"] == f"echo $$ > /tmp/run.pid; exec {train}"
    assert job["spec"]["submissionMode"] == "HTTPMode", "elsewhere another pod's shell would say its own address"


def test_a_ray_jobs_pods_are_valid_alike_and_unprivileged() -> None:
    folder = DEPLOY / "kuberay"
    validator = pytest.importorskip("kubernetes_validate")
    cluster = yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8"))["spec"]["rayClusterSpec"]
    templates = [part["template"] for part in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for number, template in enumerate(templates):
        metadata = {"name": f"p{number}", **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        validator.validate(pod, "1.33", strict=True)
        assert template["spec"]["securityContext"] == pod_specs()["rl-coserve-train"]["securityContext"]
        (container,) = template["spec"]["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["image"] == f"rl-coserve-trainer:{orchestrator.__version__}"
        same = templates[0]["spec"]
        assert (container["volumeMounts"], template["spec"]["volumes"]) == (
            same["containers"][0]["volumeMounts"],
            same["volumes"],
        )
    policy = yaml.safe_load((folder / "network.yaml").read_text(encoding="utf-8"))
    validator.validate(policy, "1.33", strict=True)
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= templates[0]["metadata"]["labels"].items()
    if shutil.which("kubectl") is not None:
        subprocess.run(["kubectl", "kustomize", folder], capture_output=True, timeout=60, check=True)


# ---------------------------------------------------------------------------------------------------------------- Slurm


@pytest.mark.parametrize("path", [*SCRIPTS, *sorted((ROOT / "scripts").glob("*.sh"))], ids=lambda path: path.name)
def test_every_shell_script_is_clean(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True, timeout=20).returncode == 0
    linter = Path(sys.executable).parent / "shellcheck"
    if not linter.exists():
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([linter, path], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""


def program(folder: Path, name: str, text: str) -> None:
    """A stand-in of this name on the path."""
    file = folder / name
    file.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


RUN_TWIN = """
import os, signal, sys, time
print("rl-coserve", *sys.argv[1:], flush=True)
if sys.argv[1] == "train":
    if "--fail" in sys.argv:
        sys.exit(7)
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os.write(1, b"ended in order\\n"), os._exit(130)))
    for word in sys.argv:
        if word.startswith("rollout.served_token_file="):
            file = word.partition("=")[2]
            print("token", len(open(file).read().strip()), oct(os.stat(file).st_mode & 0o777), flush=True)
            sys.exit(0)
    print("runs", flush=True)
    time.sleep(60)
"""


def test_a_ray_jobs_head_that_is_drained_lets_a_twin_of_the_run_end_in_order(tmp_path: Path) -> None:
    """Ray starts the line in a shell, and reaps it; `preStop` is waited for, within the pod's grace."""
    job = yaml.safe_load((DEPLOY / "kuberay" / "job.yaml").read_text(encoding="utf-8"))
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert head["terminationGracePeriodSeconds"] >= Config().checkpoint.grace + 60
    program(tmp_path, "rl-coserve", RUN_TWIN)
    there = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    line = job["spec"]["entrypoint"].replace("/tmp/", f"{tmp_path}/")
    hook = [
        part.replace("/tmp/", f"{tmp_path}/")
        for part in head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    ]
    with subprocess.Popen(line, shell=True, env=there, stdout=-1, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("rl-coserve train /etc/rl-coserve/run.toml relay.host=")
        assert run.stdout.readline() == "runs\n"
        reaper = threading.Thread(target=run.wait)
        reaper.start()
        subprocess.run(hook, env=there, timeout=20, check=True)
        reaper.join()
        assert (run.stdout.read(), run.returncode) == ("ended in order\n", 130)
    assert subprocess.run(
        hook, env=there, capture_output=True, timeout=20, check=False
    ).returncode  # nothing to wait for


def job(script: str, folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """As Slurm starts it: bash, in the folder it was submitted from."""
    environment = {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        **variables,
    }
    return subprocess.Popen(
        ["bash", DEPLOY / "slurm" / script, *arguments], cwd=folder, env=environment, stdout=-1, stderr=-1, text=True
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_node_that_dies_neither_ends_a_slurm_job_nor_begins_it_again(script: Path) -> None:
    """Both are Slurm's defaults, and the script would begin a new run."""
    lines = script.read_text(encoding="utf-8").splitlines()
    asked = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    assert "--no-requeue" in asked
    assert "--no-kill" in asked or "--nodes=1" in asked


def test_a_slurm_job_near_its_limit_lets_a_twin_of_the_run_end_in_order(tmp_path: Path) -> None:
    program(tmp_path, "rl-coserve", RUN_TWIN)
    process = job("one_node.sbatch", tmp_path, "run.toml", "run.steps=3")
    assert process.stdout is not None
    seen = [process.stdout.readline().strip() for _ in range(3)]
    assert seen == ["rl-coserve doctor --quick run.toml", "rl-coserve train run.toml run.steps=3", "runs"]
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=30)
    assert (rest, process.returncode) == ("ended in order\n", 130), errors


def test_a_slurm_job_has_the_exit_code_of_a_twin_of_the_run_and_a_resume_asks_no_doctor(tmp_path: Path) -> None:
    program(tmp_path, "rl-coserve", RUN_TWIN)
    out, _ = (failed := job("one_node.sbatch", tmp_path, "--resume", "latest", "--fail")).communicate(timeout=30)
    assert (out, failed.returncode) == ("rl-coserve train --resume latest --fail\n", 7)
    _, errors = (empty := job("one_node.sbatch", tmp_path)).communicate(timeout=30)
    assert empty.returncode == 2
    assert errors.startswith("usage:")


SERVER_TWIN = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
NODE_TWIN = (
    """
import time
if "--headless" in sys.argv:
    time.sleep(60)
"""
    + SERVER_TWIN
)
SRUN_TWIN = """
import os, sys
words = [word for word in sys.argv[1:] if not word.startswith("--nodes") and not word.startswith("--ntasks")]
words = words[next(index for index, word in enumerate(words) if not word.startswith("--")):]
os.execvp(words[0], words)
"""


@pytest.mark.slow
def test_a_job_of_several_nodes_starts_twins_of_servers_and_gives_the_run_their_addresses(tmp_path: Path) -> None:
    program(tmp_path, "rl-coserve", RUN_TWIN)
    program(tmp_path, "vllm", SERVER_TWIN)
    program(tmp_path, "srun", SRUN_TWIN)
    program(tmp_path, "scontrol", 'print("first\\n127.0.0.1")')
    port = free_port()
    variables = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "x", "RL_COSERVE_PORT": str(port)}
    process = job("served.sbatch", tmp_path, "/models/m", "run.toml", "run.steps=3", **variables)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    words = shlex.split(out.splitlines()[0].replace('"', "'\"'"))
    assert words[:4] == ["rl-coserve", "train", "run.toml", "model.path=/models/m"]
    assert f'rollout.served=["http://127.0.0.1:{port}"]' in words
    assert words[-2:] == ["relay.host=127.0.0.1", "run.steps=3"], "by which the servers are reached, not a name"
    served = [word for word in words if "=" in word and not word.startswith("model.path")]
    assert load_config(None, served).rollout.workers == 0
    length, mode = out.splitlines()[1].split()[1:]
    assert (int(length) > 32, mode) == (True, "0o600")
    assert not list(tmp_path.glob(".rl-coserve-*")), "the token outlives the job"
    wait_for(lambda: not listens(port), 10)


@pytest.mark.slow
def test_a_job_of_several_nodes_resumes_a_run_on_the_servers_that_it_has_now(tmp_path: Path) -> None:
    """Twins. After the time limit the servers are on other nodes, with another token."""
    program(tmp_path, "rl-coserve", RUN_TWIN)
    program(tmp_path, "vllm", SERVER_TWIN)
    program(tmp_path, "srun", SRUN_TWIN)
    program(tmp_path, "scontrol", 'print("first\\n127.0.0.1")')
    port = free_port()
    variables = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "x", "RL_COSERVE_PORT": str(port)}
    process = job("served.sbatch", tmp_path, "/models/m", "--resume", "latest", "run.steps=9", **variables)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    words = shlex.split(out.splitlines()[0].replace('"', "'\"'"))
    assert words[:4] == ["rl-coserve", "train", "--resume", "latest"]
    run = RunFolder.create(
        load_config(
            None,
            [
                f"run.folder={tmp_path}/runs",
                "rollout.workers=0",
                'rollout.served=["http://a"]',
                "rollout.served_allow_plain_http=true",
            ],
        )
    )
    run.unlock()
    assert config_to_continue(run, words[4:]).rollout.served == (f"http://127.0.0.1:{port}",)
    _, errors = (empty := job("served.sbatch", tmp_path, "/models/m", "--resume")).communicate(timeout=30)
    assert (empty.returncode, errors[:6]) == (2, "usage:")
    wait_for(lambda: not listens(port), 10)


FIRST_ENDS = """
import os, sys
if not os.path.exists(os.environ["HOME"] + "/ended"):
    open(os.environ["HOME"] + "/ended", "w").close()
    sys.exit(3)
"""


@pytest.mark.parametrize(("lived", "code"), [("0", 0), ("300", 1)])
def test_a_server_that_ends_is_started_again_unless_it_had_just_begun(tmp_path: Path, lived: str, code: int) -> None:
    """Twins; a server that dies in the second week would otherwise be gone for the rest of the job."""
    program(tmp_path, "rl-coserve", RUN_TWIN)
    program(tmp_path, "vllm", FIRST_ENDS + SERVER_TWIN)
    program(tmp_path, "srun", SRUN_TWIN)
    program(tmp_path, "scontrol", 'print("first\\n127.0.0.1")')
    port = free_port()
    variables = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "x", "RL_COSERVE_PORT": str(port)}
    process = job("served.sbatch", tmp_path, "/models/m", "run.toml", **variables, RL_COSERVE_LIVED=lived)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert ("vllm ended with code 3 and is started again" in errors) == (code == 0)
    assert ("a server ended before it was up" in errors) == (code == 1)
    wait_for(lambda: not listens(port), 10)


@pytest.mark.parametrize("script", ["nodes.sbatch", "served.sbatch"])
def test_what_a_node_runs_is_kept_alike_in_both_jobs_and_ends_when_it_is_told_to(tmp_path: Path, script: str) -> None:
    text = (DEPLOY / "slurm" / script).read_text(encoding="utf-8")
    keep = text.partition("keep='")[2].partition("'\n")[0]
    assert keep in (DEPLOY / "slurm" / "served.sbatch").read_text(encoding="utf-8")
    file, command = tmp_path / "pid", 'echo $$ > "$0"; exec sleep 60'
    with subprocess.Popen(["bash", "-c", keep, "keep", "bash", "-c", command, str(file)]) as kept:
        wait_for(lambda: file.exists() and file.read_text())
        kept.terminate()
        assert kept.wait(10) == 143
    assert not Path(f"/proc/{file.read_text().strip()}").exists()


@pytest.mark.long
def test_a_job_whose_engines_have_two_nodes_each_starts_their_ranks_and_asks_the_first_of_each(tmp_path: Path) -> None:
    program(tmp_path, "rl-coserve", RUN_TWIN)
    program(
        tmp_path,
        "vllm",
        "import os, sys\nopen(os.environ['SEEN'], 'a').write(' '.join(sys.argv[1:]) + '\\n')\n" + NODE_TWIN,
    )
    program(tmp_path, "srun", SRUN_TWIN)
    program(tmp_path, "scontrol", 'print("first\\n127.0.0.1\\nsecond")')
    seen, port = tmp_path / "seen", free_port()
    variables = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "x", "RL_COSERVE_PORT": str(port), "SEEN": str(seen)}
    variables |= {"RL_COSERVE_ENGINE_NODES": "2", "RL_COSERVE_VLLM_OPTIONS": "--tensor-parallel-size 16"}
    process = job("served.sbatch", tmp_path, "/models/m", "run.toml", **variables)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert f'rollout.served=["http://127.0.0.1:{port}"]' in out
    ranks = sorted(re.findall(r"--node-rank (\d)", seen.read_text()))
    assert ranks == ["0", "1"]
    for line in seen.read_text().splitlines():
        assert f"--tensor-parallel-size 16 --nnodes 2 --node-rank {int('--headless' in line)} " in line
        assert f"--master-addr 127.0.0.1 --master-port {port + 1} " in line
        assert ("--rl-token-file" in line) == ("--headless" not in line)
    odd = job("served.sbatch", tmp_path, "/models/m", "run.toml", **variables | {"RL_COSERVE_ENGINE_NODES": "3"})
    _, errors = odd.communicate(timeout=30)
    assert (odd.returncode, "RL_COSERVE_ENGINE_NODES=3" in errors) == (2, True)


def test_a_job_of_one_node_is_told_which_script_is_for_it(tmp_path: Path) -> None:
    program(tmp_path, "scontrol", 'print("first")')
    process = job("served.sbatch", tmp_path, "/models/m", "run.toml", SLURM_JOB_ID="1", SLURM_JOB_NODELIST="x")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "one_node.sbatch" in errors


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
