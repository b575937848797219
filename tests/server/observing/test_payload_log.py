"""The payload log has a whole line for each request with the client's answer, whatever fails."""

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import raw_http
from fake_engine import FakeEngine, StepGate
from least_requests import EVERY, HI, objects_of, text_of
from other_processes import limited_files

from edgeinfer.cli.verbs import doctor
from edgeinfer.config.config_file import Config, ServeConfig
from edgeinfer.errors import ServeError
from edgeinfer.runtime.events import ToolCallDelta
from edgeinfer.server import payload_log
from edgeinfer.server.payload_log import make_folder

CHAT = "/v1/chat/completions"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
ENCODED = base64.b64encode(PNG).decode()


def omission(kind, content):
    return {"omitted": kind, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def raw_lines(folder):
    files = sorted(folder.glob("payloads-*.jsonl"))
    return b"".join(path.read_bytes() for path in files).splitlines(keepends=True)


def events(folder, until, count):
    """Wait for `count` lines of the log, which follow the answers; return their events."""
    until(lambda: sum(line.endswith(b"\n") for line in raw_lines(folder)) >= count, f"{count} lines")
    lines = raw_lines(folder)
    assert len(lines) == count
    return [json.loads(line) for line in lines]


def one(folder, until):
    [event] = events(folder, until, 1)
    return event["data"]


FORMS = [(path, stream) for path in EVERY for stream in (False, True)]
FORMS.remove(("/infer", True))  # /infer does not stream


@pytest.mark.parametrize(("path", "stream"), FORMS)
def test_each_dialect_leaves_one_line_with_the_client_s_answer(serve, tmp_path, until, path, stream):
    body = EVERY[path] | ({} if path == "/infer" else {"stream": stream})
    live_server = serve(FakeEngine([["Hel", "lo ", "ü"]]), log_payloads=str(tmp_path))
    reply = live_server.post(path, body, status=200)
    [event] = events(tmp_path, until, 1)
    data = event["data"]
    [answer] = data["answers"]
    said = "".join(map(text_of, objects_of(reply.text.splitlines())))
    assert answer["text"] == said == "Hello ü"
    assert data["request"] == body
    assert (data["operation"], data["status"], data["error"]) == (f"POST {path}", 200, None)
    assert (data["outcome"], answer["finish_reason"]) == ("stop", "stop")
    assert answer["usage"]["completion_tokens"] > 0
    assert "decode_ms" in answer["timings"]
    assert data["request_id"] == reply.headers["x-request-id"]
    assert (event["specversion"], event["type"]) == ("1.0", "io.edgeinfer.generation")
    assert event["subject"].startswith("fake")
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_query_is_the_request_of_a_get(serve, tmp_path, until):
    live_server = serve(FakeEngine([["yes"]]), log_payloads=str(tmp_path))
    live_server.get("/infer", params={"prompt": "hi"})
    assert one(tmp_path, until)["request"] == {"prompt": "hi"}


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_several_answers_are_logged_whole(serve, tmp_path, until, stream):
    call = ToolCallDelta(0, id="c1", name="look", arguments='{"a"')
    calls = [call, ToolCallDelta(0, arguments=":1}")]
    live_server = serve(FakeEngine([["one"], calls]), log_payloads=str(tmp_path))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    live_server.chat(n=2, stream=stream, tools=[tool])
    answers = one(tmp_path, until)["answers"]
    assert sorted(answer["text"] for answer in answers) == ["", "one"]
    called = [call for answer in answers for call in answer["tool_calls"]]
    assert called == [{"id": "c1", "name": "look", "arguments": '{"a":1}'}]


@pytest.mark.parametrize(
    ("content", "code", "request_shown"),
    [
        (b'{"messages": []}', None, {"messages": []}),
        (b'{"messages"', "invalid_json", omission("not JSON", b'{"messages"')),
        (b"QUJD", "invalid_json", omission("not JSON", b"QUJD")),
    ],
)
def test_refused_request_is_logged_with_its_error(serve, tmp_path, until, content, code, request_shown):
    live_server = serve(log_payloads=str(tmp_path))
    reply = live_server.client.post(CHAT, content=content, headers={"content-type": "application/json"})
    data = one(tmp_path, until)
    assert data["request"].items() >= request_shown.items()
    assert data["error"]["message"] == reply.json()["error"]["message"]
    assert data["error"]["code"] == (code or reply.json()["error"]["code"])
    assert (data["status"], data["answers"]) == (400, [])


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_logs_the_text_generated_so_far(serve, tmp_path, until, stream):
    gate = StepGate()
    live_server = serve(FakeEngine([["one ", gate, "two"]]), log_payloads=str(tmp_path))
    with raw_http.connect(live_server.port) as client:
        client.sendall(raw_http.post(raw_http.HI_BODY | {"stream": stream}))
        assert gate.reached.wait(60)
    until(lambda: raw_lines(tmp_path), "the line")
    data = one(tmp_path, until)
    assert data["outcome"] == "disconnected"
    assert [answer["text"] for answer in data["answers"]] == ["one "]


def test_requests_without_generation_or_opted_out_are_not_logged(serve, tmp_path, until):
    live_server = serve(log_payloads=str(tmp_path))
    live_server.post("/tokenize", {"content": "hi"})
    for value in ("1", "True", "0", "false", ""):
        headers = {"x-edgeinfer-no-log": value}
        body = {"messages": HI, "user": value}
        assert live_server.post(CHAT, body, headers=headers).status_code == 200
    users = [event["data"]["request"]["user"] for event in events(tmp_path, until, 3)]
    assert users == ["0", "false", ""]
    status = live_server.get("/status").json()["payload_log"]
    assert (status["folder"], status["opted_out"], status["dropped"]) == (str(tmp_path), 2, 0)
    assert "edgeinfer_payload_log_opted_out_total 2.0" in live_server.get("/metrics").text


@pytest.mark.parametrize(
    ("content_part", "kind"),
    [
        ({"image_url": {"url": f"data:image/png;base64,{ENCODED}"}}, "image/png"),
        ({"image_url": f"data:image/png;base64,{ENCODED}"}, "image/png"),
        ({"image_url": f"DATA:image/png;a=b;base64,{ENCODED[:76]}\r\n{ENCODED[76:]}"}, "image/png"),
        ({"source": {"type": "base64", "media_type": "image/png", "data": ENCODED}}, "image/png"),
        ({"input_audio": {"format": "wav", "data": ENCODED}}, "audio/wav"),
        ({"images": [ENCODED]}, "image"),
        ({"prompt": {"prompt_string": "<__media__>", "multimodal_data": [ENCODED]}}, "image"),
        ({"file": {"file_data": ENCODED}}, "file"),
    ],
)
def test_bytes_of_pictures_and_audio_are_omitted(serve, tmp_path, until, content_part, kind):
    live_server = serve(log_payloads=str(tmp_path))
    content = [{"type": "text", **content_part}]
    live_server.chat(messages=[{"role": "user", "content": content}])
    data = one(tmp_path, until)
    assert ENCODED[:40] not in json.dumps(data)
    assert json.dumps(omission(kind, PNG)) in json.dumps(data)


def test_text_is_never_taken_for_a_picture(serve, tmp_path, until):
    live_server = serve(log_payloads=str(tmp_path))
    texts = ["data: a", "data:text,b", "aGVsbG8=", "see data:image/png;base64,AAAA"]
    texts += ["data:;base64,QUJD how are you", "data:a/b;base64,QUJD how", "data:a/b;base64,QUJDR"]
    turns = [{"role": "user", "content": text} for text in texts]
    live_server.chat(messages=turns, tools=[], response_format={"type": "text"})
    assert one(tmp_path, until)["request"]["messages"] == turns


@pytest.mark.parametrize("depth", [600, 950])
def test_deep_nesting_is_logged_or_named(serve, tmp_path, until, depth):
    live_server = serve(log_payloads=str(tmp_path))
    nested = b"[" * depth + b"]" * depth
    body = json.dumps({"messages": HI}).encode().replace(b"}]}", b'}], "x": ' + nested + b"}")
    headers = {"content-type": "application/json"}
    assert live_server.client.post(CHAT, content=body, headers=headers).status_code == 200
    request = one(tmp_path, until)["request"]
    if depth == 600:
        assert nested in raw_lines(tmp_path)[0]
    else:
        assert request == omission("deep nesting", body)


def test_long_request_is_omitted_so_that_its_line_can_be_checked(serve, tmp_path, until, monkeypatch):
    monkeypatch.setattr(payload_log, "MAX_LINE_BYTES", 4000)
    live_server = serve(log_payloads=str(tmp_path))
    body = json.dumps({"messages": HI, "x": "y" * 4000}).encode()
    headers = {"content-type": "application/json"}
    assert live_server.client.post(CHAT, content=body, headers=headers).status_code == 200
    data = one(tmp_path, until)
    assert data["request"] == omission("a long request", body)
    assert len(data["answers"]) == 1


def test_files_rotate_by_size_and_old_ones_are_removed(serve, tmp_path, until, monkeypatch):
    monkeypatch.setattr(payload_log, "_MAX_BYTES", 4000)
    old, foreign = tmp_path / "payloads-20200101-000000-1.jsonl", tmp_path / "notes.txt"
    for path in (old, foreign):
        path.write_text("{}\n")
        os.utime(path, (0, 0))
    live_server = serve(log_payloads=str(tmp_path))
    for number in range(8):
        live_server.chat(user=str(number))
    users = [event["data"]["request"]["user"] for event in events(tmp_path, until, 8)]
    assert users == [str(number) for number in range(8)]
    files = list(tmp_path.glob("payloads-*"))
    assert len(files) > 1
    assert max(path.stat().st_size for path in files) <= 4000
    assert foreign.exists()
    assert not old.exists()


def make_files(folder, ages_days):
    """Make a file of the log for each age; return them."""
    files = [folder / f"payloads-20250101-00000{n}-{n}.jsonl" for n in range(len(ages_days))]
    for path, age_days in zip(files, ages_days, strict=True):
        path.touch()
        os.utime(path, (0, time.time() - age_days * 86_400))
    return files


@pytest.mark.parametrize(
    "name",
    ["my-audit-of-2025", "20250101", "20250101-000000", "20250101-000000-1-copy", "20250101-000000-x"],
)
def test_old_file_of_another_name_is_not_removed(serve, tmp_path, name):
    audit = tmp_path / f"payloads-{name}.jsonl"
    audit.touch()
    os.utime(audit, (0, 0))
    old, new = make_files(tmp_path, [31, 0])
    serve(log_payloads=str(tmp_path))
    assert [path.exists() for path in (audit, old, new)] == [True, False, True]


@pytest.mark.parametrize("ahead_days", [0, 31, 10_000])
def test_clock_that_is_ahead_removes_no_newer_file(serve, tmp_path, ahead_days):
    ages_days = [0, 1, 29, 31, 60]
    files = make_files(tmp_path, [age + ahead_days for age in ages_days])
    serve(log_payloads=str(tmp_path))
    assert [path.exists() for path in files] == [age < 30 for age in ages_days]


def test_file_of_the_future_does_not_make_others_old(serve, tmp_path):
    files = make_files(tmp_path, [-100, 0, 29, 31])
    serve(log_payloads=str(tmp_path))
    assert [path.exists() for path in files] == [True, True, True, False]


def test_each_failure_is_logged_when_it_begins_and_again_while_it_lasts(serve, tmp_path, monkeypatch):
    now_s = 1000.0
    live_server = serve()
    log = payload_log.PayloadLog(tmp_path, live_server.endpoint)
    monkeypatch.setattr(payload_log, "time", SimpleNamespace(monotonic=lambda: now_s))
    for after_s, n_logged in ((0, 1), (1, 1), (59, 2), (1, 2), (60, 3)):  # one failure
        now_s += after_s
        log._drop("full", 0)
        assert live_server.log.getvalue().count("payload-log-fails") == n_logged
    log._count("written", 0)
    log._drop("full again", 0)  # within a minute
    assert live_server.log.getvalue().count("payload-log-fails") == 4


def test_overload_logs_each_reason_once_a_minute(serve, tmp_path, monkeypatch):
    now_s = 1000.0
    live_server = serve()
    log = payload_log.PayloadLog(tmp_path, live_server.endpoint)
    monkeypatch.setattr(payload_log, "time", SimpleNamespace(monotonic=lambda: now_s))
    for number in range(1000):  # within 50 s
        now_s += 0.05
        log._drop(("full", "overloaded")[number % 2], 0)
        log._count("written", 0)
    assert live_server.log.getvalue().count("payload-log-fails") == 2
    now_s += 10.1  # a minute after the first warning of "full"
    log._drop("full", 0)
    assert live_server.log.getvalue().count("payload-log-fails") == 3


def test_old_files_stay_until_the_second_file_after_a_pause(serve, tmp_path):
    """A clock that is ahead looks like a pause."""
    files = make_files(tmp_path, [31, 32])
    log = payload_log.PayloadLog(tmp_path, serve().endpoint)
    log._append(b"{}\n")
    assert all(path.exists() for path in files)
    log._path = Path()
    log._append(b"{}\n")
    assert not any(path.exists() for path in files)


@pytest.mark.parametrize("replacement", ["link", "writable", "file"])
def test_folder_replaced_while_serving_is_not_written_to(serve, tmp_path, until, replacement):
    folder, other = tmp_path / "log", tmp_path / "other"
    live_server = serve(log_payloads=str(folder))
    live_server.chat()
    events(folder, until, 1)
    shutil.copytree(folder, other)  # with the file that is being written
    shutil.move(folder, tmp_path / "away")
    if replacement == "link":
        folder.symlink_to(other)
    elif replacement == "writable":
        shutil.move(other, folder)
        folder.chmod(0o777)
    else:
        folder.touch()
    assert live_server.chat().status_code == 200
    until(lambda: live_server.endpoint.payload_log.status["dropped"] == 1, "the line is dropped")
    if replacement != "file":
        assert len(raw_lines(folder)) == 1


@pytest.mark.parametrize("problem", ["full", "gone"])
def test_failed_payload_log_loses_lines_but_no_request(serve, tmp_path, until, problem):
    folder = tmp_path / "log"
    live_server = serve(log_payloads=str(folder))
    live_server.chat(user="before")
    events(folder, until, 1)
    if problem == "full":  # the next line is cut in the middle, the one after it at once
        most = len(raw_lines(folder)[0]) + 100
    else:
        most = 1 << 30
        shutil.move(folder, tmp_path / "away")
    with limited_files(most):
        assert [live_server.chat().status_code for _ in range(3)] == [200] * 3
        until(lambda: live_server.endpoint.payload_log.status["dropped"] == 3, "three lines to drop")
    if problem == "gone":
        shutil.move(tmp_path / "away", folder)
    live_server.chat(user="after")
    users = [event["data"]["request"]["user"] for event in events(folder, until, 2)]
    assert users == ["before", "after"]
    assert live_server.log.getvalue().count("payload-log-fails") == 1
    assert "edgeinfer_payload_log_dropped_total 3.0" in live_server.get("/metrics").text
    until(lambda: not live_server.get("/status").json()["payload_log"]["failure"], "no failure stays")


def test_lines_beyond_the_bound_are_dropped_and_no_request_waits(serve, tmp_path, until, monkeypatch):
    monkeypatch.setattr(payload_log, "_MAX_WAITING_BYTES", 0)
    live_server = serve(log_payloads=str(tmp_path))
    assert live_server.chat().status_code == 200
    until(lambda: live_server.endpoint.payload_log.status["dropped"] == 1, "the line is dropped")
    monkeypatch.undo()
    live_server.chat()
    events(tmp_path, until, 1)


SERVER = """
import sys, threading
folder = sys.argv.pop(1)
sys.path[:0] = sys.argv[1:]
from served_endpoint import serving
with serving(log_payloads=folder) as live_server:
    def ask(number):
        live_server.chat(user=str(number), messages=[dict(role="user", content="x" * 2000)])
    for number in range(500):
        live_server.pool.submit(ask, number)
    threading.Event().wait()
"""


def test_killed_process_leaves_whole_lines(tmp_path, until):
    folder = tmp_path / "log"
    command = [sys.executable, "-c", SERVER, str(folder), *sys.path]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as child:
        until(lambda: child.poll() is not None or len(raw_lines(folder)) > 50, "lines are written")
        assert child.poll() is None, child.stderr.read()
        child.send_signal(signal.SIGKILL)
    lines = raw_lines(folder)
    assert 50 < len(lines) < 500
    assert {json.loads(line)["specversion"] for line in lines[:-1]} == {"1.0"}


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_folder_that_others_may_change_is_refused(tmp_path, mode):
    folder = tmp_path / "log"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ServeError, match="others may write"):
        make_folder(folder)


def test_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "t.txt").touch()
    with pytest.raises(ServeError, match=r"t\.txt is a file, not a folder"):
        make_folder(tmp_path / "t.txt")


def test_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path
    if os.geteuid() == 0:
        os.chown(folder, 65_534, -1)
    else:
        folder = Path("/usr")
    with pytest.raises(ServeError, match="another user"):
        make_folder(folder)


def test_new_folder_is_the_user_s_and_the_start_is_loud(serve, tmp_path):
    live_server = serve(log_payloads=str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert "payload-log" in live_server.log.getvalue()
    assert serve().client.get("/status").json()["payload_log"] is None


def test_doctor_warns_of_a_log_that_the_configuration_switches_on(monkeypatch):
    monkeypatch.setattr(doctor, "load_config", Config)
    assert doctor._configuration().status == "ok"
    monkeypatch.setattr(doctor, "load_config", lambda: Config(serve=ServeConfig(log_payloads="/p")))
    assert doctor._configuration().status == "warn"
    assert "/p" in doctor._configuration().found
