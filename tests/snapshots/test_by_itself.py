"""Background builds, workers for other models, and `serve` across crashes, with the real model."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import httpx2
import pytest
from other_processes import command_name, free_port, wait_until

from .conftest import MODEL, NO_AUTO_WARM, Endpoint

pytestmark = pytest.mark.criu


def test_first_launch_is_cold_and_the_next_resumed(user):
    first = user.ask()
    assert first.start["how"] == "cold"
    assert "no snapshot yet" in first.err
    assert "built in" in user.logged("built in")
    assert user.ask().start["how"] == "resumed"


def test_cold_start_line_names_the_model_that_was_found(user):
    missing = user.run("run", "nosuch", "hi")
    assert (missing.code, "cold start" in missing.err) == (3, False)
    user.settings('default-model = "other"\n')
    said = user.run("run", MODEL, "hi", "--max-tokens", "2").err
    assert said.count("cold start") == 1
    assert f"cold start: {MODEL} has no snapshot yet (`edgeinfer warm {MODEL}` builds it now)" in said
    refused = user.run("run", MODEL, "hi", "--lora", "nosuch")
    assert (refused.code == 0, "cold start" in refused.err) == (False, False)


@pytest.mark.needs("time")
def test_unconfigured_options_are_built_after_their_second_use(user):
    log = user.data / "state/auto-warm.log"
    assert user.ask("--ctx", "5").code != 0
    assert user.ask("--ctx", "5").code != 0  # a failed launch does not count as a use
    user.ask("--ctx", "512").check()
    assert "not built before these options are used again" in user.logged(f"{MODEL},ctx=512")
    assert user.ask("--ctx", "512").start["how"] == "cold"
    user.logged("built in")
    assert user.ask("--ctx", "512").start["how"] == "resumed"
    assert f"{MODEL},ctx=5: built" not in log.read_text()


def test_stopping_the_app_does_not_stop_its_endpoint_for_ever(warm):
    with Endpoint(warm, MODEL) as endpoint:
        endpoint.ask()
        (app,) = endpoint.apps()
        os.kill(app, signal.SIGSTOP)
        state = Path(f"/proc/{app}/stat")
        wait_until(lambda: state.read_text().rpartition(") ")[2][0] == "T", "the app to stop")
        os.kill(app, signal.SIGCONT)
        assert endpoint.ask()["usage"]["completion_tokens"] == 3
    assert endpoint.process.returncode == 0


def test_app_is_shown_by_ps_as_the_verb_and_its_model(warm):
    for options, title in (((), f"edgeinfer serve {MODEL}"), (("--resume=never",), "edgeinfer serve")):
        with Endpoint(warm, MODEL, *options) as endpoint:
            endpoint.ask()
            (app,) = endpoint.apps()
            shown = Path(f"/proc/{app}/cmdline").read_bytes().rstrip(b"\0").decode()
            assert (shown, command_name(app)) == (title, "edgeinfer")
            rows = warm.run("ps", "--json").result["running"]
            assert [row["pid"] for row in rows] == [endpoint.process.pid]


def test_named_snapshot_is_resumed_by_name_alone(user):
    user.settings(NO_AUTO_WARM)
    user.run("warm", MODEL, "--ctx", "512", "--name", "short", "--quiet").check()
    plain = user.ask()
    assert plain.start["how"] == "cold"
    assert "no snapshot yet" in plain.err
    # a named snapshot ignores configured options
    user.settings(f"{NO_AUTO_WARM}[load]\nctx = 1024\n")
    assert user.ask("--snapshot", "short").start["snapshot"] == f"{MODEL},short"
    command = ("run", "Name three colours.", *"--max-tokens 2 --json --snapshot".split())
    result = user.run(*command, f"{MODEL},short").result
    assert (result["model"], result["start"]["how"]) == (MODEL, "resumed")
    other = user.ask("--snapshot", "short", "--ctx", "2048")
    assert (other.code, "made with --ctx 512, not --ctx 2048" in other.err) == (7, True)
    missing = user.ask("--snapshot", "long")
    assert (missing.code, f"name one of: {MODEL},short" in missing.err) == (7, True)
    assert user.ask("--snapshot", "short", "--resume=auto").code == 2
    assert re.search(r"^--ctx +512 +as asked$", user.run("snapshots", "show", "short").out, re.M)


@pytest.mark.needs("time")
def test_a_system_prompt_of_its_own_does_not_replace_the_plain_snapshot(user):
    user.run("warm", MODEL, "--quiet").check()
    said = user.run("warm", MODEL, "--system", "You are a pirate.").check().out
    name = said.partition("edgeinfer chat --snapshot ")[2].strip()
    assert name.startswith(f"{MODEL},system-")
    shown = user.run("snapshots", "show", name).out
    assert re.search(rf"^start +edgeinfer chat --snapshot {name}$", shown, re.M)
    assert re.search(r"^system prompt +You are a pirate\.$", shown, re.M)
    assert user.ask().start["snapshot"] == MODEL
    named = user.ask("--snapshot", name)
    assert named.start["snapshot"] == name
    typed = user.ask("--resume=never", "--system", "You are a pirate.")
    assert named.result["text"] == typed.result["text"]
    assert named.result["usage"]["prompt_tokens"] == typed.result["usage"]["prompt_tokens"]


def test_auto_warm_off_builds_nothing(user):
    user.settings(NO_AUTO_WARM)
    user.ask()
    assert not user.snapshots.exists()
    assert not (user.data / "state/auto-warm.log").exists()


def test_another_model_is_resumed_in_a_worker_and_ends_with_the_endpoint(warm):
    warm.run("pull", str(warm.model), "--name", "second", "--in-place", "--quiet").check()
    resumed_other = warm.run("run", "second", MODEL, "--max-tokens", "2", "--json")
    assert resumed_other.err.count("cold start") == 1, "of this process, not of its worker too"
    assert resumed_other.start["how"] == "cold"  # the launcher took the prompt for the model
    warm.run("warm", "second", "--quiet").check()
    with Endpoint(warm, MODEL) as endpoint:
        first = endpoint.ask(MODEL)["choices"][0]["text"]
        assert endpoint.ask("second")["choices"][0]["text"] == first
        apps = endpoint.apps()
        assert len(apps) == 2
        assert '"where":"worker"' in endpoint.log.read_text().replace(" ", "")
        assert '"how":"resumed"' in endpoint.log.read_text().replace(" ", "")
        os.kill(apps[1], signal.SIGKILL)
        assert endpoint.ask("second")["choices"][0]["text"] == first
    warm.run("snapshots", "rm", "second").check()
    warm.run("rm", "second", "--yes").check()


def test_ollamas_place_is_held_by_a_resumed_endpoint_and_across_its_death(warm):
    port = free_port()
    environment = {"EDGEINFER_OLLAMA_PORT": str(port)}
    with Endpoint(warm, MODEL, "--ollama", "--resume=always", env=environment) as endpoint:
        for _ in range(2):
            asked = {"model": MODEL, "prompt": "Hello", "options": {"num_predict": 3}}
            answer = httpx2.post(f"http://127.0.0.1:{port}/api/generate", json=asked, timeout=60)
            assert json.loads(answer.text.splitlines()[-1])["eval_count"] == 3
            endpoint.kill_app()


def test_ps_shows_a_launch_and_where_its_prompt_differed_and_stop_ends_it(warm):
    with Endpoint(warm, MODEL) as endpoint:
        for last in ("sparrow", "hammer"):
            body = {"model": MODEL, "prompt": f"One two three four, a {last} here", "max_tokens": 1}
            endpoint.post(body)
        rows = warm.run("ps", "--json").result["running"]
        (row,) = [row for row in rows if str(endpoint.port) in row["arguments"]]
        ((last,), pid) = row["last_prompts"], row["pid"]
        assert (row["verb"], last["divergence"]["cause"]) == ("serve", "text")
        assert "hammer" in last["divergence"]["here"]
        assert f"{pid} {MODEL}: " in warm.run("ps").out
        assert warm.run("stop", str(pid), "--json").result["stopped"] == [pid]
        assert endpoint.process.wait(60) == 0
    assert warm.run("stop", "nothing").code == 2


@pytest.mark.needs("time")
def test_two_programs_resume_their_own_and_the_one_that_is_gone_is_pruned(user, place):
    copy = place.folder / "second"
    shutil.copytree(place.sources, copy)
    second = {"env": {"PYTHONPATH": str(copy)}}
    user.settings(NO_AUTO_WARM)
    user.run("warm", MODEL, "--quiet").check()
    user.run("warm", MODEL, "--quiet", **second).check()
    assert user.ask().start["how"] == "resumed"
    assert user.ask(**second).start["how"] == "resumed"
    states = [s["state"] for s in user.run("snapshots", "--json").result["snapshots"]]
    assert sorted(states) == [f"belongs to another program: {copy}/edgeinfer", "ready"]
    assert user.run("snapshots", "prune", "--json").result["removed"] == []

    shutil.rmtree(copy)
    assert user.run("snapshots", "prune", "--json").result["removed"] == [MODEL]
    assert user.ask().start["how"] == "resumed"
