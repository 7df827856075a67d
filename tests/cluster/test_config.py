import pytest

from pdrelay.cluster.config import load
from pdrelay.cluster.units import parse_address, parse_rate, parse_size, parse_time
from pdrelay.errors import ConfigError

GOOD = """
fleet_key_file = "fleet.key"

[model]
name = "smollm2"
path = "model"

[gateway]
cluster = "dc-a"

[tls]
directory = "tls"

[[cluster]]
name = "dc-a"

[[cluster]]
name = "dc-b"

[[host]]
name = "host-a"
cluster = "dc-a"
socket = "a.sock"
listen = "127.0.0.1:7001"

[[host]]
name = "host-b"
cluster = "dc-b"
socket = "b.sock"
listen = "127.0.0.1:7002"

[[instance]]
name = "p-0"
cluster = "dc-a"
roles = ["prefill"]
ranks = [{ host = "host-a" }]
listen = "127.0.0.1:8101"

[[instance]]
name = "md-0"
cluster = "dc-b"
roles = ["decode"]
ranks = [{ host = "host-b" }]
listen = "127.0.0.1:8103"

[[link]]
source = "dc-a"
target = "dc-b"
rate = "20mbit"
rtt = "30ms"
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "pdrelay.toml"
        path.write_text(text)
        return path

    return write


def test_a_good_file(write, tmp_path):
    deployment = load(
        write(GOOD.replace('socket = "b.sock"', 'socket = "b.sock"\ndisk = {path = "kv", size = "1GiB"}'))
    )
    disk = deployment.host_named("host-b").disk
    assert disk is not None
    assert disk.path == str(tmp_path / "kv")
    assert deployment.instance_named("p-0").host == "host-a"
    assert deployment.link_between("dc-a", "dc-b").rate == "20mbit"
    assert deployment.link_between("dc-b", "dc-a") is None
    assert deployment.model.path == str(tmp_path / "model")
    assert deployment.host_named("host-a").socket == str(tmp_path / "a.sock")
    assert deployment.fleet_key_file == str(tmp_path / "fleet.key")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "smollm2"', "name = 5", r"model.name: found 5, expected str"),
        ('name = "smollm2"', "", r"model.name: found nothing, expected a value"),
        ('[tls]\ndirectory = "tls"', "", r": tls: found nothing, expected a value"),
        ('cluster = "dc-a"\n\n[tls]', 'clutser = "dc-a"\n\n[tls]', r"gateway.c\w+: found"),
        (
            'roles = ["decode"]',
            'roles = ["decoder"]',
            r"instance\[1\].roles\[0\]: found 'decoder', expected one of prefill, relay, decode",
        ),
        (
            'roles = ["decode"]',
            "roles = []",
            r"instance\[1\].roles: found \[\], expected some of prefill, relay, decode",
        ),
        (
            '{ host = "host-b" }',
            '{ host = "host-c" }',
            r"instance\[1\].ranks\[0\].host: found 'host-c', expected one of",
        ),
        ('{ host = "host-b" }', '{ host = "host-a" }', r"instance\[1\].ranks\[0\].host: .* a host of dc-b"),
        ('target = "dc-b"', 'target = "dc-c"', r"link\[0\].target: found 'dc-c', expected one of dc-a, dc-b"),
        ('rate = "20mbit"', 'rate = "20 furlongs"', r"link\[0\].rate: found '20 furlongs', expected a rate such as"),
        ('socket = "b.sock"', 'socket = "b.sock"\ndisk = {path = "kv"}', r"host\[1\].disk.size: found nothing"),
        (
            'socket = "b.sock"',
            'socket = "b.sock"\ndisk = {path = "kv", size = "big"}',
            r"host\[1\].disk.size: found 'big', expected a size such as",
        ),
        ('rtt = "30ms"', 'rtt = "soon"', r"link\[0\].rtt: found 'soon', expected a time such as"),
        ('listen = "127.0.0.1:8103"', 'listen = "8103"', r"instance\[1\].listen: found '8103', expected an address"),
        ('name = "md-0"', 'name = "p-0"', r"instance\[1\].name: found 'p-0', expected a name that no other has"),
        ('name = "md-0"', 'name = "host-b"', r"instance\[1\].name: found 'host-b', expected a name that no host has"),
        ('name = "md-0"', 'name = "gateway"', r"instance\[1\].name: found 'gateway', expected another name"),
        ('rtt = "30ms"', 'codec = "gzip"', r"link\[0\].codec: found 'gzip', expected one of .*fp8.*zstd"),
        ('rate = "20mbit"', 'rate = "0bit"', r"link\[0\].rate: found '0bit', expected a rate above 0, or auto"),
        ('rtt = "30ms"', 'schedule = "lifo"', r"link\[0\].schedule: found 'lifo', expected one of .*fair.*srpt"),
        (
            'rtt = "30ms"',
            "connections_per_transfer = 5",
            r"link\[0\].connections_per_transfer: found 5, expected 0 \(all\) to 4",
        ),
        ('rtt = "30ms"', 'transport = "pigeon"', r"link\[0\].transport: found 'pigeon', expected one of .*nixl.*tcp"),
        (
            'rtt = "30ms"',
            'nixl_env = { A = "b" }',
            r"link\[0\].nixl_env: found {'A': 'b'}, expected nothing with .*'tcp'",
        ),
        ('rtt = "30ms"', 'transport = "nixl"\ncodec = "zstd"', r"link\[0\].codec: found 'zstd', expected 'none' with"),
        (
            'rtt = "30ms"',
            'transport = "nixl"\ncongestion = "bbr"',
            r"link\[0\].congestion: found bbr, expected nothing with transport = 'nixl'",
        ),
        ('rtt = "30ms"', "connections = 0", r"link\[0\].connections: found 0, expected at least 1"),
        (
            "[gateway]",
            "[policy]\nhit_threshold = 2.0\n[gateway]",
            r"policy.hit_threshold: found 2.0, expected a number",
        ),
        ("[gateway]", '[policy]\nname = "best"\n[gateway]', r"policy.name: found 'best', expected one of .*pdd"),
        (
            "[gateway]",
            '[[adapter]]\nname = "smollm2"\npath = "a"\n[gateway]',
            r"adapter\[0\].name: found 'smollm2', expected a name, and not the model's",
        ),
        (
            "[gateway]",
            '[[adapter]]\nname = "a"\npath = ""\n[gateway]',
            r"adapter\[0\].path: found '', expected a directory with PEFT's",
        ),
        (
            "[gateway]",
            '[[adapter]]\nname = "a"\npath = "a"\nrank = 1000\n[gateway]',
            r"adapter\[0\].rank: found 1000, expected a number from 1 to 512",
        ),
        ("[model]", "[model", r"not valid TOML"),
    ],
)
def test_a_bad_file_is_one_clear_error(write, old, new, message):
    assert old in GOOD
    path = write(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "nope.toml")


def test_units():
    assert parse_rate("20mbit") == 2.5e6
    assert parse_time("30ms") == pytest.approx(0.03)
    assert parse_size("1GiB") == 2**30
    assert parse_address("[::1]:80") == ("::1", 80)
    for parse in (parse_rate, parse_time, parse_size, parse_address):
        with pytest.raises(ValueError, match="expected"):
            parse("many")
