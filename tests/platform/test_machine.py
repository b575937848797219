"""`doctor`, `version` and `config` on this machine."""

import sys

import pytest
from other_processes import run

from edgeinfer.cli.main import main
from edgeinfer.cli.verbs import doctor as doctor_module
from edgeinfer.cli.verbs.doctor import DoctorResult, Finding
from edgeinfer.errors import EngineError
from edgeinfer.platform import machine, paths
from edgeinfer.platform.machine import Machine, Memory
from edgeinfer.runtime.llama.backends import MissingBackend

DEFAULT = "smollm2-135m-instruct"


@pytest.fixture
def checks(as_json):
    """Run `doctor`, which exits with `code`; return its checks by name."""
    return lambda code=0: {check["name"]: check for check in as_json("doctor", code=code)["checks"]}


def test_doctor_calls_a_default_model_that_is_not_pulled_a_todo(checks):
    check = checks()["catalogue"]
    assert (check["status"], check["fix"]) == ("todo", f"edgeinfer pull {DEFAULT}")


def test_doctor_is_content_once_the_main_job_works(checks, smollm2):
    assert main(["pull", str(smollm2), "--name", DEFAULT]) == 0
    by_name = checks()
    assert {name: c["found"] for name, c in by_name.items() if c["status"] == "fail"} == {}
    assert "weights" not in by_name
    assert "threads" in by_name["cpu"]["found"]
    assert "LLAMAFILE" in by_name["llama.cpp"]["found"]
    assert str(paths.data_dir()) in by_name["directories"]["found"]


def test_doctor_says_how_fast_a_default_model_larger_than_memory_is(checks, smollm2, monkeypatch):
    assert main(["pull", str(smollm2), "--name", DEFAULT]) == 0
    memory = Memory(total_bytes=1 << 30, available_bytes=80 << 20, reason="made up")
    small = Machine(physical_cores=2, logical_cpus=2, quota=None, memory=memory)
    monkeypatch.setattr(machine, "read_machine", lambda: small)
    monkeypatch.setattr(machine, "read_rate", lambda path: 48.3e6)
    check = checks()["weights"]
    assert check["status"] == "warn"
    assert "a token in 2.0 s: 96.6 MB a token at 48.3 MB/s (measured just now)" in check["found"]
    assert "list --fits" in check["fix"]


def test_doctor_names_a_mistake_in_the_configuration_and_goes_on(checks):
    paths.config_dir().mkdir(parents=True)
    (paths.config_dir() / "config.toml").write_text("[lod]\n")
    by_name = checks(code=1)
    assert "unknown key `lod`; did you mean `load`?" in by_name["configuration"]["found"]
    assert by_name["llama.cpp"]["status"] == "ok"


def test_doctor_names_a_signing_key_that_cannot_be_used(checks, tmp_path):
    paths.config_dir().mkdir(parents=True)
    (paths.config_dir() / "config.toml").write_text(f'[receipts]\nkey = "{tmp_path}/key.pem"\n')
    check = checks(code=1)["configuration"]
    assert check["found"] == f"receipts.key: {tmp_path}/key.pem: No such file or directory"
    (tmp_path / "key.pem").write_text("x")
    (tmp_path / "key.pem").chmod(0o644)
    assert checks(code=1)["configuration"]["fix"] == f"chmod 600 {tmp_path}/key.pem"


def test_doctor_reports_a_library_that_does_not_load(monkeypatch):
    def fail():
        raise EngineError("no CPU backend", hint="install it")

    assert doctor_module._run_check("llama.cpp", fail) == [
        Finding("fail", "no CPU backend", "install it", name="llama.cpp")
    ]


@pytest.mark.parametrize(("is_used", "status"), [(True, "ok"), (False, "warn")])
def test_doctor_warns_of_a_backend_without_a_device_unless_another_has_it(is_used, status):
    missing = MissingBackend(name="vulkan", reason="no Vulkan driver has a device here", absent=True)
    assert doctor_module._backend(missing, ("NVIDIA",), is_used=is_used).status == status


def test_doctor_reads_without_colour():
    checks = (Finding("ok", "fine", name="a"), Finding("fail", "no", "do this", name="bb"))
    shown = DoctorResult(version="1", checks=checks).human()
    assert shown == "edgeinfer 1\n  ok    a   fine\n  FAIL  bb  no\n            → do this"


def test_version_names_llama_cpps_commit(as_json):
    envelope = as_json("version")
    assert len(envelope["llama_cpp_commit"]) >= 7
    assert envelope["cpu_variant"].isalnum()
    assert envelope["llama_cpp_python"] == "0.3.36"


def test_config_shows_what_is_in_force(as_json, capsys):
    shown = as_json("config")
    assert (shown["exists"], shown["config"]["default-model"]) == (False, DEFAULT)
    assert main(["config"]) == 0
    assert 'default-model = "smollm2-135m-instruct"' in capsys.readouterr().out


def test_config_hides_the_secrets_of_tool_servers(capsys):
    path = paths.config_dir() / "config.toml"
    path.parent.mkdir(parents=True)
    servers = 'home = { url = "http://127.0.0.1/", headers = { Authorization = "Bearer s3cret" } }\n'
    servers += 'files = { command = ["cat"], env = { TOKEN = "s3cret" } }\n'
    path.write_text(f"[tools.servers]\n{servers}")
    for argv in (["config"], ["config", "--json"]):
        assert main(argv) == 0
        said = capsys.readouterr().out
        assert "TOKEN" in said
        assert "Authorization" in said
        assert "s3cret" not in said


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["run", "--help"]])
def test_help_and_version_exit_0(argv):
    done = run(sys.executable, "-m", "edgeinfer", *argv)
    assert "edgeinfer" in done.stdout
    assert done.stderr == ""
