"""The command line of an engine. Needs no vLLM."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pdrelay.cli.engine import command as engine_command
from pdrelay.cluster.config import Deployment, load
from pdrelay.engine.vllm import launch
from pdrelay.engine.vllm.settings import parse
from pdrelay.errors import ConfigError

TOML = """
fleet_key_file = "fleet.key"
[model]
name = "smol"
path = "models/smol"
max_model_len = 2048
dtype = "float32"
[gateway]
cluster = "far"
[tls]
directory = "certs"
[[cluster]]
name = "far"
[[host]]
name = "h"
cluster = "far"
socket = "run/h.sock"
listen = "127.0.0.1:7000"
[[instance]]
name = "p-0"
cluster = "far"
roles = ["prefill"]
ranks = [{host = "h"}]
listen = "127.0.0.1:7001"
args = ["--max-num-seqs", "4"]
env = {OMP_NUM_THREADS = "8"}
[[instance]]
name = "d-0"
cluster = "far"
roles = ["decode"]
ranks = [{host = "h"}]
listen = "127.0.0.1:7002"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "pdrelay.toml"
    path.write_text(TOML)
    return path


def _option(argv: list[str], name: str) -> str:
    """The value that counts: the last one."""
    return argv[len(argv) - 1 - argv[::-1].index(name) + 1]


def _extra(deployment: Deployment, name: str) -> dict[str, object]:
    transfer = json.loads(_option(launch.command(deployment, name).argv, "--kv-transfer-config"))
    assert transfer["kv_connector_module_path"] == "pdrelay.engine.vllm.connector"
    return transfer["kv_connector_extra_config"]


def test_what_the_operator_wrote_wins(config: Path) -> None:
    command = launch.command(load(config), "p-0")
    assert _option(command.argv, "--max-num-seqs") == "4"
    assert command.env["OMP_NUM_THREADS"] == "8"
    assert command.env["VLLM_PLUGINS"] == "pdrelay"
    assert (_option(command.argv, "--host"), _option(command.argv, "--port")) == ("127.0.0.1", "7001")
    assert _option(command.argv, "--dtype") == "float32"


def test_both_sides_of_a_connection_are_verified(config: Path) -> None:
    argv = launch.command(load(config), "p-0").argv
    assert _option(argv, "--ssl-cert-reqs") == "2"
    for option, file in (("--ssl-certfile", "p-0.pem"), ("--ssl-keyfile", "p-0.key"), ("--ssl-ca-certs", "ca.pem")):
        assert Path(_option(argv, option)) == config.parent / "certs" / file


def test_the_connector_knows_its_depot_and_role(config: Path) -> None:
    deployment = load(config)
    settings = parse(_extra(deployment, "d-0"))
    assert settings.depot_socket == str(config.parent / "run/h.sock")
    assert (settings.instance, settings.model, settings.publish_decode) == ("d-0", "smol", True)
    assert not parse(_extra(deployment, "p-0")).publish_decode


def _with_ranks(config: Path, ranks: str) -> Deployment:
    text = TOML.replace(
        'ranks = [{host = "h"}]\nlisten = "127.0.0.1:7001"', f'ranks = [{ranks}]\nlisten = "127.0.0.1:7001"'
    )
    config.write_text(
        text + '[[host]]\nname = "i"\ncluster = "far"\nsocket = "run/i.sock"\nlisten = "127.0.0.1:7009"\n'
    )
    return load(config)


def test_the_fleet_stores_layers_in_as_many_shards_as_its_widest_instance_has_ranks(config: Path) -> None:
    deployment = _with_ranks(config, '{host = "h"}, {host = "h", tensor = 1}')
    wide, narrow = (launch.command(deployment, name).argv for name in ("p-0", "d-0"))
    assert (_option(wide, "--tensor-parallel-size"), _option(wide, "--distributed-executor-backend")) == ("2", "mp")
    assert "--tensor-parallel-size" not in narrow
    assert [parse(_extra(deployment, name)).shards for name in ("p-0", "d-0")] == [2, 2]


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ('{host = "h"}, {host = "h", pipeline = 1}', "found pipeline rank 1, expected only 0"),
        ('{host = "h"}, {host = "h", tensor = 2}', r"found tensor ranks \[0, 2\], expected \[0, 1\]"),
        ('{host = "h"}, {host = "i", tensor = 1}', "found tensor ranks on hosts h, i, expected all on one"),
    ],
)
def test_ranks_that_cannot_be_served_are_refused(config: Path, ranks: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        launch.command(_with_ranks(config, ranks), "p-0")


def test_wrong_extra_config_is_told() -> None:
    with pytest.raises(ConfigError, match="instance"):
        parse({"depot_socket": "x"})


def test_the_printed_line_is_what_is_run(config: Path) -> None:
    result = CliRunner().invoke(engine_command, ["--config", str(config), "--name", "p-0", "--print"])
    assert result.exit_code == 0
    words = shlex.split(result.output)
    command = launch.command(load(config), "p-0")
    assert words == ["env", *(f"{key}={value}" for key, value in command.env.items()), *command.argv]


def test_adapters_are_served_as_models_of_their_own(config: Path) -> None:
    argv = launch.command(load(config), "p-0").argv
    assert "--enable-lora" not in argv
    adapters = [("pirate", 8), ("poet", 20)]
    config.write_text(
        TOML + "".join(f'[[adapter]]\nname = "{name}"\npath = "{name}-v1"\nrank = {rank}\n' for name, rank in adapters)
    )
    argv = launch.command(load(config), "p-0").argv
    assert "--enable-lora" in argv
    assert [_option(argv, name) for name in ("--max-loras", "--max-cpu-loras", "--max-lora-rank")] == ["2", "2", "32"]
    at = argv.index("--lora-modules")
    assert argv[at + 1 : at + 3] == [f"{name}={config.parent / name}-v1" for name, _ in adapters]
    settings = parse(_extra(load(config), "p-0"))
    assert settings.adapters == {"pirate": "pirate@", "poet": "poet@"}


def test_an_adapter_that_is_not_what_the_file_says_is_told(config: Path) -> None:
    config.write_text(TOML + '[[adapter]]\nname = "pirate"\npath = "pirate"\n')
    arguments = ["--config", str(config), "--name", "p-0"]
    complaints = [(None, r"adapter\[0\].path: found no rank"), (64, r"adapter\[0\].rank: found 16, expected 64")]
    for written, complaint in complaints:
        if written is not None:
            (config.parent / "pirate").mkdir()
            (config.parent / "pirate" / "adapter_config.json").write_text(json.dumps({"r": written}))
        result = CliRunner().invoke(engine_command, arguments)
        assert isinstance(result.exception, ConfigError)
        assert re.search(complaint, str(result.exception))
    assert CliRunner().invoke(engine_command, [*arguments, "--print"]).exit_code == 0


def test_an_unknown_instance_is_told(config: Path) -> None:
    result = CliRunner().invoke(engine_command, ["--config", str(config), "--name", "x"])
    assert isinstance(result.exception, ConfigError)
    assert "expected one of p-0, d-0" in str(result.exception)


def test_gpu_engines_schedule_asynchronously(config: Path) -> None:
    config.write_text(config.read_text().replace("[[instance]]", '[[instance]]\ndevice = "cuda"'))
    argv = launch.command(load(config), "p-0").argv
    assert _option(argv, "--scheduler-cls").endswith("PdrelayAsyncScheduler")
    assert "--worker-cls" not in argv
    assert msgspec.json.decode(_option(argv, "--kv-transfer-config"))["kv_role"] == "kv_both"
