"""`doctor`, `version` and `config` on this very machine."""

import json
import subprocess

import pytest

from edgeinfer.cli.main import main
from edgeinfer.cli.verbs import doctor as doctor_module
from edgeinfer.cli.verbs.doctor import Check, DoctorResult
from edgeinfer.errors import EngineError
from edgeinfer.platform import paths

DEFAULT = "smollm2-135m-instruct"


def result_of(capsys, *argv):
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def checks(body):
    return {check["name"]: check for check in body["result"]["checks"]}


def test_doctor_calls_a_default_model_that_is_not_pulled_a_todo(capsys):
    code, body = result_of(capsys, "doctor")
    assert (code, body["ok"]) == (0, True)
    assert checks(body)["catalogue"]["status"] == "todo"
    assert checks(body)["catalogue"]["fix"] == f"edgeinfer pull {DEFAULT}"


def test_doctor_is_content_once_the_main_job_works(capsys, smollm2):
    assert main(["pull", str(smollm2), "--name", DEFAULT]) == 0
    capsys.readouterr()
    code, body = result_of(capsys, "doctor")
    found = checks(body)
    assert {name: c["found"] for name, c in found.items() if c["status"] == "fail"} == {}
    assert code == 0
    assert "threads" in found["cpu"]["found"]
    assert "LLAMAFILE" in found["llama.cpp"]["found"]
    assert str(paths.data_dir()) in found["directories"]["found"]


def test_doctor_names_a_mistake_in_the_configuration_and_goes_on(capsys):
    paths.config_dir().mkdir(parents=True)
    (paths.config_dir() / "config.toml").write_text("[lod]\n")
    code, body = result_of(capsys, "doctor")
    found = checks(body)
    assert code == 1
    assert 'unknown key "lod"; did you mean "load"?' in found["configuration"]["found"]
    assert found["llama.cpp"]["status"] == "ok"


def test_doctor_reports_a_library_that_does_not_load(monkeypatch):
    def broken():
        raise EngineError("no CPU backend")

    assert doctor_module._guarded("llama.cpp", broken) == [
        Check("llama.cpp", "fail", "no CPU backend", "run `edgeinfer doctor`")
    ]


def test_doctor_reads_without_colour():
    shown = DoctorResult(
        version="1", checks=(Check("a", "ok", "fine"), Check("bb", "fail", "no", "do this"))
    ).human()
    assert shown == "edgeinfer 1\n  ok    a   fine\n  FAIL  bb  no\n            → do this"


def test_version_names_llama_cpps_commit(capsys):
    code, body = result_of(capsys, "version")
    assert code == 0
    assert len(body["result"]["llama_cpp_commit"]) >= 7
    assert body["result"]["cpu_variant"].isalnum()
    assert body["result"]["llama_cpp_python"] == "0.3.36"


def test_config_shows_what_is_in_force(capsys):
    code, body = result_of(capsys, "config")
    assert (code, body["result"]["exists"]) == (0, False)
    assert body["result"]["config"]["default-model"] == DEFAULT
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
    import sys

    done = subprocess.run([sys.executable, "-m", "edgeinfer", *argv], capture_output=True, text=True)
    assert done.returncode == 0
    assert "edgeinfer" in done.stdout
    assert done.stderr == ""
