"""The deployment that `up` writes, and the demo tokenizer of emulated engines."""

import socket
from pathlib import Path

import pytest

from pdrelay.cli.local import demo_tokenizer
from pdrelay.cli.local.layout import Demo, Settings, choose_places, deployment_text
from pdrelay.cli.local.plan import parts_of
from pdrelay.cluster import config
from pdrelay.cluster.ports import free_addresses, require_free
from pdrelay.cluster.topology import Role
from pdrelay.errors import ConfigError
from pdrelay.gateway.protocol import ChatRequest, Message
from pdrelay.gateway.text import load_text
from pdrelay.perf import profile
from pdrelay.wan.serve import routes, settings
from pdrelay.wan.shaper import Lane


def write(directory: Path, wanted: Settings) -> tuple[config.Deployment, Path]:
    path = directory / "pdrelay.toml"
    model = Demo("a-model", directory / 'model "quoted"')
    path.write_text(deployment_text(wanted, model, choose_places(directory, directory / "tls")))
    return config.load(path), path


@pytest.mark.parametrize("policy", ["pdd", "cdc_pd", "idc_pd"])
@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("rate", ["20mbit", "unlimited", "0"])
def test_the_file_is_accepted(tmp_path, policy, emulated, rate):
    deployment, _ = write(tmp_path, Settings(policy=policy, emulated=emulated, wan_rate=rate, debug=True, port=8123))
    assert deployment.gateway.listen == "127.0.0.1:8123"
    assert deployment.gateway.debug
    assert deployment.policy.name == policy
    relay = deployment.instance_named("rld-0")
    assert (Role.DECODE in relay.roles) == (policy == "idc_pd")
    assert {instance.engine for instance in deployment.instance} == {"emulated" if emulated else "vllm"}


def test_everything_between_the_datacenters_goes_through_the_line(tmp_path):
    deployment, path = write(tmp_path, Settings())
    depot, main = deployment.host_named("host-b"), deployment.instance_named("md-0")
    link = deployment.link_between("dc-a", "dc-b")
    lanes = {f"{r.listen[0]}:{r.listen[1]}": r.lane for r in routes(deployment)}
    assert lanes == {
        depot.address: Lane.CONTROL, main.address: Lane.CONTROL, link.bulk["host-b"]: Lane.BULK,
    }  # fmt: skip
    assert link.control["host-b"] == depot.address
    wanted = settings(path, None, None, "127.0.0.1:0")
    assert (wanted.rate, wanted.rtt) == (2.5e6, 0.03)


def test_parts_start_line_first_and_engines_last(tmp_path):
    deployment, path = write(tmp_path, Settings())
    parts = parts_of(deployment, path, "127.0.0.1:1", "unlimited")
    stages = [sorted(part.name for part in parts if part.stage == stage) for stage in range(3)]
    assert stages == [["line"], ["host-a", "host-b"], ["gateway", "md-0", "p-0", "rld-0"]]
    assert parts[0].arguments[-2:] == ["--rate", "unlimited"]


def test_a_step_time_chooses_the_worker_that_keeps_it(tmp_path):
    deployment, _ = write(tmp_path, Settings(step_time="150ms"))
    for instance in deployment.instance:
        module, _, name = instance.args[instance.args.index("--worker-cls") + 1].rpartition(".")
        assert (Path("src", *module.split(".")).with_suffix(".py")).read_text().count(f"class {name}(") == 1
        assert instance.env["PDRELAY_STEP_SECONDS"] == "0.15"
    assert not write(tmp_path, Settings())[0].instance[0].args


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"wan_rate": "fast"}, "--wan-rate"),
        ({"wan_rtt": "30"}, "--wan-rtt"),
        ({"step_time": "slow"}, "--step-time"),
        ({"step_time": "10ms", "emulated": True}, "--step-time: found with --emulated"),
    ],
)
def test_a_bad_option_is_named(options, named):
    with pytest.raises(ConfigError, match=named):
        Settings(**options).check()


def test_ports_are_distinct_and_a_taken_one_is_told_with_its_owner():
    assert len(set(free_addresses(20))) == 20
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is taken by process \d+ .*; choose another"):
            require_free("127.0.0.1", port, "choose another with --port")


def test_the_demo_tokenizer_round_trips_and_its_profile_fits(tmp_path):
    demo_tokenizer.build(tmp_path)
    text = load_text(tmp_path)
    for sample in ("hello", "a  b\n\tc", "grüße, 世界 🎈", "<|im_end|>"):
        ids = text.backend.encode(sample, add_special_tokens=False).ids
        assert text.backend.decode(ids, skip_special_tokens=False) == sample
    vocabulary = profile.load(tmp_path / demo_tokenizer.PROFILE).vocabulary
    assert vocabulary.last < text.vocab_size == text.backend.get_vocab_size()
    assert vocabulary.eos == text.defaults.eos
    assert "user\nhi<|im_end|>" in text.render(ChatRequest(messages=[Message(role="user", content="hi")]))
